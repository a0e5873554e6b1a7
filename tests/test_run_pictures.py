"""What a run draws: the same samples with truth and prediction, and no trace of it in the training."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics import Metric

from lockstep import Metrics, Presenter, Task, Trainer
from tests import runs
from tests.ranks import run_ranks
from tests.selection import mainly

Image = pytest.importorskip("PIL.Image")

CLASSES = ["red", "green", "blue"]
SHOWN = []
"""What the presenter was asked to draw in this process: truth, value of the first pixel, and output."""


class Colours(Dataset):
    """Pictures of a colour each, sorted by class. Reading draws random numbers."""

    def __init__(self, length, broken=()):
        self.length, self.broken = length, broken

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("cannot be read")
        label = index * 3 // self.length
        image = torch.randint(0, 100, (3, 12, 16), dtype=torch.uint8)
        image[label] += 100 + index
        return image, label


class Draws(Presenter):
    def describe(self, output):
        return {"prediction": CLASSES[int(output.argmax())], "probability": float(output.max())}

    def truth(self, sample):
        return CLASSES[sample[1]]

    def class_names(self):
        return CLASSES

    def picture(self, sample, prepared, output):
        torch.rand(3), np.random.random(), random.random()  # no training may notice
        SHOWN.append((sample[1], int(prepared[0].flatten()[0]), output))
        return (prepared[0] * 255).byte().permute(1, 2, 0).numpy()


class Pictures(Task):
    presenter = Draws

    def __init__(self, broken=()):
        self.broken = broken

    def model(self):
        parts = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 80, 3)]
        return nn.Sequential(*parts)

    def train_data(self):
        return Colours(48)

    def eval_data(self):
        return Colours(39, self.broken)

    def prepare(self, sample, epoch, training):
        image, label = sample
        left = int(torch.randint(0, 7, ())) if training else 3
        return image[:, 1:9, left : left + 10].float() / 255 + np.random.random() / 1000 + random.random() / 1000, label

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).softmax(dim=1)

    def metrics(self):
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

        counts = {"accuracy": MulticlassAccuracy(3, average="micro"), "confusion": MulticlassConfusionMatrix(3)}
        return Metrics(counts, lambda metrics, output, batch: metrics.update(output, batch[1]))


class WithoutMetrics(Pictures):
    """Its loss returns the output, so that pictures need no metrics."""

    def loss(self, model, batch):
        logits = model(batch[0])
        loss = functional.cross_entropy(logits, batch[1], reduction="sum")
        return loss if model.training else (loss, logits.softmax(dim=1))

    def metrics(self):
        return None


def settings(pictures=5, workers=0, **sections):
    log = {"writers": ["text_log", "json_lines", "tensorboard"], "every_steps": 6, "pictures": pictures}
    if not pictures:
        log["model_summary"] = False
    base = {
        "batch": {"global": 8, "micro": 4},
        "train": {"steps": 12, "eval_every_steps": 6},
        "data": {"workers": workers, "on_error": "skip"},
        "log": log,
    }
    return runs.config(**{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def fit(kind, options, config, folder):
    """Final weights, results, and what was drawn in this process."""
    SHOWN.clear()
    weights, results = runs.fit(globals()[kind](**options), config, folder)
    return weights, results, [(label, pixel, None if out is None else out.tolist()) for label, pixel, out in SHOWN]


def summaries(folder):
    """Of TensorBoard's files: the steps of each picture by name, and the number of nodes of the graph."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps, nodes = {}, 0
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            nodes += event.graph_def.count(b"/") if event.graph_def else 0
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "images" or value.HasField("image"):
                    steps.setdefault(value.tag, []).append(event.step)
    return steps, nodes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "workers"), mainly([(1, 2)], [(1, 0), (1, 2), (2, 0)]))
def test_drawing_changes_no_bit(world, workers, tmp_path):
    plain = run_ranks(world, fit, "Pictures", {}, settings(0, workers), tmp_path / "plain")
    drawn = run_ranks(world, fit, "Pictures", {}, settings(5, workers), tmp_path / "drawn")
    for (weights, results, nothing), (others, same, _) in zip(plain, drawn, strict=True):
        assert nothing == []
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert {name: value for name, value in results.items() if "eval/" in name} == {
            name: value for name, value in same.items() if "eval/" in name
        }
    assert not (tmp_path / "plain" / "samples").exists()
    assert not (tmp_path / "plain" / "model.txt").exists()
    assert {path.name for path in (tmp_path / "drawn" / "samples").iterdir()} == {
        "augmented.png",
        "step-00000006.png",
        "step-00000012.png",
    }
    assert len(list((tmp_path / "drawn" / "pictures").iterdir())) == 2
    steps, nodes = summaries(tmp_path / "drawn")
    assert steps == {"samples/augmented": [0], "samples/evaluation": [6, 12], "eval/confusion": [6, 12]}
    assert nodes > 5
    assert "1 x 4 x 8 x 10" in (tmp_path / "drawn" / "model.txt").read_text()


@pytest.mark.parametrize("kind", mainly(["Pictures"], ["Pictures", "WithoutMetrics"]))
def test_same_samples_with_their_outputs_on_any_number_of_ranks(kind, tmp_path):
    seen = {}
    for world, strategy in ((1, "ddp"), (2, "ddp"), (3, "ddp"), (2, "fsdp")):
        config = settings(optim={"lr": 1e-30, "weight_decay": 0.0}, parallel={"strategy": strategy})
        told = run_ranks(world, fit, kind, {}, config, tmp_path / f"{world}{strategy}")
        assert all(shown == [] for _, _, shown in told[1:])
        shown = told[0][2]
        assert [output for _, _, output in shown[:20]] == [None] * 20  # five samples in four epochs
        evaluated = shown[20:]
        assert [label for label, _, _ in evaluated] == [0, 0, 1, 1, 2] * 2
        seen[world, strategy] = evaluated
    first = seen[1, "ddp"]
    for other in seen.values():
        assert [part[:2] for part in other] == [part[:2] for part in first]
        assert np.allclose([part[2] for part in other], [part[2] for part in first], atol=1e-5)
    text = (tmp_path / "2fsdp" / "model.txt").read_text()
    assert "each rank holds only a shard" in text
    assert re.search(r"^sharded parameter +shape +rows by rank$", text, re.MULTILINE)
    shards = text[text.index("sharded parameter") :].splitlines()[1:]
    for line in shards:
        _, *shape, first, second = re.split(r" x |, | +", line.strip())
        assert int(shape[0]) == int(first) + int(second), line
    assert "Linear" in text


class DrawsWorst(Draws):
    """Says how wrong outputs are, and draws a curve."""

    picture_side = 96

    def mistakes(self, output, batch):
        return (batch[0][:, 0, 0, 0] * 255).round()  # a pixel of the picture: no rounding of the model counts

    def pictures(self, values):
        assert values["curve"].shape == (2, 3)
        assert isinstance(values["points"], tuple)
        return {"recall": np.full((20, 30, 3), int(values["curve"].sum()), np.uint8)}


class Worst(Pictures):
    presenter = DrawsWorst

    def metrics(self):
        found = super().metrics()
        return Metrics(found.metrics | {"curve": Points(False), "points": Points(True)}, found.update)


class Points(Metric):
    """Counts samples, and returns the points of a curve as a matrix or as a tuple."""

    def __init__(self, is_tuple):
        super().__init__()
        self.is_tuple = is_tuple
        self.add_state("count", torch.zeros(2, 3), dist_reduce_fx="sum")

    def update(self, output, labels):
        self.count += len(labels)

    def compute(self):
        return tuple(self.count) if self.is_tuple else self.count


def test_worst_samples_are_the_same_on_any_number_of_ranks(tmp_path):
    seen = {}
    for world in (1, 2, 3):
        config = settings(pictures=3, optim={"lr": 1e-30, "weight_decay": 0.0}, train={"steps": 6})
        told = run_ranks(world, fit, "Worst", {}, config, tmp_path / str(world))
        seen[world] = [part[:2] for part in told[0][2][-3:]]
        folder = tmp_path / str(world)
        assert {path.name for path in (folder / "samples").iterdir()} >= {"worst-step-00000006.png"}
        assert np.asarray(Image.open(folder / "pictures" / "recall-step-00000006.png"))[0, 0, 0] == 39 * 6
        steps, _ = summaries(folder)
        assert steps["samples/worst"] == steps["eval/recall"] == [6]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (entry,) = [line for line in lines if "eval/loss" in line]
        assert entry["memory/evaluation_mb"] >= 0
        assert not [name for name in entry if "curve" in name or "points" in name]
        assert '"curve": [[39.0, 39.0, 39.0]' in (folder / "metric_arrays.jsonl").read_text()
    assert seen[1] == seen[2] == seen[3]
    pixels = [pixel for _, pixel in seen[1]]
    assert pixels == sorted(pixels, reverse=True)
    sheet = np.asarray(Image.open(tmp_path / "1" / "samples" / "worst-step-00000006.png"))
    assert sheet.shape == (8 + 8 * (96 // 10) + 8 + 4 * 14, 8 + 3 * (96 + 8), 3)  # one row, and captions of four lines


def test_failing_mistakes_are_one_warning(tmp_path, capsys):
    class Failing(Draws):
        def mistakes(self, output, batch):
            raise KeyError("no box")

    class Shown(Pictures):
        presenter = Failing

    runs.fit(Shown(), settings(), tmp_path)
    warning = "warning: samples/worst cannot be written: RuntimeError: Presenter.mistakes failed: KeyError: 'no box'"
    assert (tmp_path / "train.log").read_text().count(warning) == 1
    assert (tmp_path / "samples" / "step-00000006.png").exists()


def test_unreadable_samples_are_left_out(tmp_path):
    _, _, shown = fit("Pictures", {"broken": (15,)}, settings(), tmp_path)
    assert [label for label, _, output in shown if output is not None] == [0, 0, 1, 2] * 2


def test_resumed_run_draws_the_same_samples_and_no_training_samples_again(tmp_path):
    fit("Pictures", {}, settings(train={"steps": 6}), tmp_path)
    before = (tmp_path / "model.txt").stat().st_mtime_ns
    _, _, shown = fit("Pictures", {}, settings(), tmp_path)
    assert len(shown) == 5
    assert (tmp_path / "model.txt").stat().st_mtime_ns == before


def test_failing_presenter_is_one_warning(tmp_path, capsys):
    class Failing(Draws):
        def picture(self, sample, prepared, output):
            raise KeyError("nothing to draw")

    class Shown(Pictures):
        presenter = Failing

    runs.fit(Shown(), settings(), tmp_path)
    log = (tmp_path / "train.log").read_text()
    for name in ("samples/augmented", "samples/evaluation"):
        assert log.count(f"warning: {name} cannot be written: KeyError: 'nothing to draw'; training continues") == 1
    assert "samples/evaluation" in capsys.readouterr().err
    assert not (tmp_path / "samples").exists()


@dataclasses.dataclass
class Strange:
    """What torch's trace does not take as an output."""

    tensor: torch.Tensor


class Untraceable(Pictures):
    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def model(self):
        fails = self.fails

        class Odd(nn.Linear):
            def forward(self, images):
                if fails and torch.jit.is_tracing():
                    raise ValueError("no trace of me")
                return Strange(super().forward(images.flatten(1)))

        return Odd(240, 3)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]).tensor, batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).tensor.softmax(dim=1)


@pytest.mark.parametrize("fails", mainly([True], [False, True]))
def test_model_that_cannot_be_traced_has_a_table_and_no_graph(fails, tmp_path):
    runs.fit(Untraceable(fails), settings(), tmp_path)
    assert "Odd" in (tmp_path / "model.txt").read_text()
    warning = "warning: the graph of the model in tensorboard cannot be written: RuntimeError: no trace of me"
    assert (tmp_path / "train.log").read_text().count(warning) == fails
    steps, nodes = summaries(tmp_path)
    assert len(steps) == 3
    assert bool(nodes) != fails


def test_model_that_fails_on_one_sample_has_a_table_that_says_so(tmp_path):
    class Pairs(Pictures):
        def loss(self, model, batch):
            assert len(batch[1]) > 1, "needs two samples"
            return super().loss(model, batch)

    runs.fit(Pairs(), settings(), tmp_path)
    assert "AssertionError: needs two samples" in (tmp_path / "model.txt").read_text()


def test_fresh_run_deletes_the_pictures_of_the_old_run(tmp_path):
    fit("Pictures", {}, settings(), tmp_path)
    config = settings(0, train={"steps": 1, "eval_every_steps": 0})
    Trainer(config, run_dir=tmp_path, quiet=True, fresh=True).fit(Pictures())
    assert not {"samples", "pictures", "model.txt"} & {path.name for path in tmp_path.iterdir()}
