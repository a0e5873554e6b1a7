"""P4: the metric on N ranks is the metric on one. Against plain torch and torchmetrics in one process."""

import dataclasses
import pickle
import weakref

import numpy as np
import pytest
import torch

from lockstep import LockstepError, Metrics, Presenter, Trainer
from lockstep.core import task_checks
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import EvaluationPlan
from lockstep.core.evaluate import predict, predict_each, split
from lockstep.core.metric_sync import compute
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.strategy import Forward
from lockstep.core.parallel.world import World
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks

LENGTHS = [0, 1, 2, 3, 4, 7, 16, 30]  # none, fewer than ranks, not divisible, several micro-batches per rank
MICRO = 4


def by_hand(length):
    """One process, the whole data set at once."""
    task = own_tasks.Classes(eval_length=length)
    torch.manual_seed(0)
    model = task.model()
    batch = task.eval_data().tensors
    with torch.no_grad():
        loss, output = task.loss(model, batch), task.predict(model, batch)
    metrics, update = task_checks.metrics(task)
    update(metrics, output, batch)
    return float(loss) / length, metrics.compute(), output.tolist()


@pytest.fixture(scope="module")
def evaluated():
    """By number of ranks: what each rank answers for each length."""
    worlds = (3, 2, 1)  # the largest first: ranks that import torchmetrics together take no longer than one that does
    return {world: run_ranks(world, rank_cases.evaluate_and_predict_quietly, LENGTHS, MICRO) for world in worlds}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics warns of classes without samples; so it does by hand
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_data_set_size_gives_the_numbers_of_plain_torch(evaluated, world):
    answers = evaluated[world]
    for number, length in enumerate(LENGTHS):
        for rank in range(1, world):
            assert repr(answers[rank][number][0]) == repr(answers[0][number][0])  # every rank gets the same results
            assert answers[rank][number][1] is None
        results, outputs, shown = answers[0][number]
        assert results["samples"] == length
        if length == 0:
            assert results == {"samples": 0, "bad": 0}
            assert outputs == []
            continue
        loss, metrics, expected_outputs = by_hand(length)
        assert results["loss"] == pytest.approx(loss, rel=1e-12)
        for name in ("accuracy", "f1", "auroc", "confidence"):
            assert results[name] == pytest.approx(float(metrics[name]), rel=1e-6), name
        assert not any("confusion" in name for name in results)  # a table is no number to log
        assert shown[0] == metrics["confusion"].tolist()
        assert [index for index, _ in shown[1]] == list(range(min(4, MICRO, length)))
        assert torch.allclose(
            torch.tensor([output for _, output in shown[1]]),
            torch.tensor(expected_outputs)[: len(shown[1])],
            rtol=1e-12,
        )
        if length > 4:
            assert results["correlation"] == pytest.approx(float(metrics["correlation"]), rel=1e-5)
        assert torch.allclose(torch.tensor(outputs), torch.tensor(expected_outputs), rtol=1e-12)


def test_loss_and_counting_metrics_are_bitwise_those_of_one_process(evaluated):
    (single,) = evaluated[1]
    for world in (2, 3):
        answers = evaluated[world][0]
        for (one, one_outputs, _), (many, many_outputs, _) in zip(single, answers, strict=True):
            for name in one.keys() - {"confidence", "correlation"}:  # float running sums of torchmetrics: to rounding
                assert repr(one[name]) == repr(many[name]), name
            assert one_outputs == many_outputs


# ---- what travels between ranks


def gathering(monkeypatch, gathered):
    """World.gather notes the pickled size of what it is given."""
    gather = World.gather
    monkeypatch.setattr(
        World, "gather", lambda self, value: (gathered.append(len(pickle.dumps(value))), gather(self, value))[1]
    )
    return World(0, 1, 0, torch.device("cpu"))


class Shapes(own_tasks.Plain):
    """Outputs that are views of more: of a hidden layer, and one by one."""

    def predict(self, model, batch):
        hidden = torch.ones(len(batch[0]), 1000) * batch[0][:, :1]
        return {
            "first": hidden[:, 0],
            "ten": hidden[:, :10],
            "list": list(hidden[:, :10]),
            "pair": (batch[1], hidden[:, 0]),
        }


@pytest.mark.parametrize("lengths", [None, 3], ids=["in order", "by length"])
def test_predictions_travel_as_their_values_and_not_with_all_that_they_are_views_of(monkeypatch, lengths):
    sizes = []
    world = gathering(monkeypatch, sizes)
    task = Shapes(eval_length=512)
    plan = EvaluationPlan(512, 64, None if lengths is None else np.arange(512) % lengths)
    loader = Loader(MicroBatches(task.eval_data(), task, 0, training=False), 0, world.device)
    outputs = predict(
        task,
        Forward(task.model(), task.loss),
        loader,
        plan=plan,
        world=world,
        precision=Precision("fp32", world.device),
    )
    values = 512 * (1 + 10 + 10 + 5 + 1) * 8
    assert sum(sizes) < 1.2 * values + 512 * 600  # each tensor of the list has pickle's words around it
    first = task.eval_data().tensors[0][:, 0]
    assert torch.equal(torch.stack([output["first"] for output in outputs]), first)
    assert all(torch.equal(output["list"], first[number].expand(10)) for number, output in enumerate(outputs))
    parts = [output["ten"] for output in outputs]
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)  # also for who keeps one of them


def test_a_wrong_output_is_an_error_before_the_other_batches_are_computed():
    calls = []

    class Wrong(own_tasks.Plain):
        def predict(self, model, batch):
            calls.append(1)
            return torch.ones(3)

    world, task = World(0, 1, 0, torch.device("cpu")), Wrong(eval_length=40)
    loader = Loader(MicroBatches(task.eval_data(), task, 0, training=False), 0, world.device)
    with pytest.raises(LockstepError, match=r"shape \(3,\) for 8 samples"):
        predict(
            task,
            Forward(task.model(), task.loss),
            loader,
            plan=EvaluationPlan(40, 8),
            world=world,
            precision=Precision("fp32", world.device),
        )
    assert len(calls) == 1


def test_states_of_metrics_travel_as_their_values(monkeypatch):
    from torchmetrics import CatMetric, MetricCollection

    sizes = []
    world = gathering(monkeypatch, sizes)
    metrics = MetricCollection([CatMetric()])
    for _ in range(4):
        metrics.update(torch.ones(64, 1000)[:, 3])
    flat, _ = compute(metrics, world)
    assert len(flat) == 256
    assert sum(sizes) < 4 * (64 * 4 + 1000)


# ---- what a task gets wrong


def test_split_gives_one_output_per_sample():
    batch = {"a": torch.arange(6).reshape(3, 2), "b": (torch.ones(3), [1, 2, 3])}
    parts = split(batch, 3)
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[2]["b"] == (torch.tensor(1.0), 3)


@dataclasses.dataclass
class Found:
    logits: torch.Tensor
    more: object = None


def test_split_takes_whatever_a_task_may_return():
    assert split(None, 2) == [None, None]
    assert split((), 2) == [(), ()]
    assert [part.tolist() for part in split(np.arange(4).reshape(2, 2), 2)] == [[0, 1], [2, 3]]
    parts = split({"a": Found(torch.ones(2), {"b": None, "c": (torch.zeros(2), ["x", "y"])})}, 2)
    assert parts == [{"a": {"logits": 1.0, "more": {"b": None, "c": (0.0, name)}}} for name in "xy"]
    outputs = pytest.importorskip("transformers.modeling_outputs")
    (first, _) = split(outputs.SequenceClassifierOutput(logits=torch.ones(2, 3)), 2)
    assert {name: value.tolist() for name, value in first.items()} == {"logits": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ({"a": {"loss": torch.tensor(1.0)}}, r"output 'a/loss' of shape \(\) for 2 samples"),
        ((torch.ones(2), np.ones(3)), r"output '1' of shape \(3,\) for 2 samples"),
        (Found(torch.ones(2), [1, 2, 3]), r"output 'more' of type list of 3 cannot be split into 2 samples"),
        ({"a": object()}, "output 'a' of type object cannot be split into 2 samples"),
    ],
)
def test_part_of_an_output_that_is_not_one_per_sample_is_named(output, named):
    with pytest.raises(LockstepError, match=named) as caught:
        split(output, 2)
    assert "first dimension is the batch" in caught.value.remedy


def test_output_that_is_not_one_per_sample_is_an_error():
    with pytest.raises(LockstepError, match=r"shape \(2,\) for 3 samples"):
        split(torch.ones(2), 3)
    with pytest.raises(LockstepError, match="str"):
        split("no", 3)


class ReportsMean(Presenter):
    def report(self, values, samples):
        return f"mean {float(values['mean']):.3f} beside {len(samples)} samples"


class Overall(own_tasks.Classes):
    """Metrics of an output that is not one per sample, and a report that is asked for."""

    presenter = ReportsMean

    def metrics(self):
        from torchmetrics import MeanMetric, MetricCollection

        return Metrics(MetricCollection({"mean": MeanMetric()}), lambda metrics, output, batch: metrics.update(output))

    def predict(self, model, batch):
        return super().predict(model, batch).mean()


def test_metrics_of_outputs_that_are_not_one_per_sample_are_reported_without_samples(tmp_path):
    settings = runs.config(train={"steps": 2, "eval_every_steps": 2})
    results = Trainer(settings, run_dir=tmp_path, quiet=True).fit(Overall())
    assert results["eval/mean"] == pytest.approx(1 / 3)
    assert "mean 0.333 beside 0 samples" in (tmp_path / "train.log").read_text()


def test_random_numbers_of_an_evaluation_depend_on_its_samples_alone():
    """Not on the world, nor on what training or loading drew before."""
    options = {"length": 24, "eval_length": 30}
    settings = runs.config(
        train={"steps": 4, "eval_every_steps": 2}, batch={"micro": 4}, optim={"lr": 1e-30, "weight_decay": 0.0}
    )
    losses = set()
    for world, workers in ((1, 0), (1, 2), (2, 0), (3, 0)):
        for _, results in run_ranks(
            world, runs.fit_kind, "Drawing", options, settings | {"data": {"workers": workers}}
        ):
            losses.add(results["eval/loss"])
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            lambda loss: {"other": loss},
            r"Task\.loss, in evaluation: the loss has the heads \['other'\], Task\.weight has \['loss'\]",
        ),
        (lambda loss: loss.expand(3), r"Task\.loss, in evaluation: it returned a tensor of shape \(3,\)"),
        (float, "it returned a float"),
    ],
    ids=["heads", "vector", "float"],
)
def test_losses_that_an_evaluation_cannot_add_are_named(tmp_path, losses, message):
    runs.fit(own_tasks.Masked(), runs.config(train={"steps": 1}), tmp_path)

    class Wrong(own_tasks.Masked):
        def loss(self, model, batch):
            return losses(super().loss(model, batch))

    with pytest.raises(LockstepError, match=message):
        Trainer(runs.config(), run_dir=tmp_path, quiet=True).evaluate(Wrong(eval_length=10))


def test_metrics_that_a_task_makes_once_begin_anew_in_each_evaluation(tmp_path):
    class Kept(own_tasks.Classes):
        kept = None

        def metrics(self):
            self.kept = self.kept or super().metrics()
            return self.kept

    settings = runs.config(train={"steps": 8, "eval_every_steps": 2})
    _, once = runs.fit(Kept(), settings, tmp_path / "kept")
    _, anew = runs.fit(own_tasks.Classes(), settings, tmp_path / "new")
    assert {name: value for name, value in once.items() if "eval/" in name} == {
        name: value for name, value in anew.items() if "eval/" in name
    }


class Part:
    """Something that lives as long as the output of a sample is kept."""

    def __init__(self, index):
        self.index = index


def test_outputs_are_given_one_by_one_and_none_is_kept():
    task = own_tasks.Classes(eval_length=50)
    world, alive = World(0, 1, 0, torch.device("cpu")), weakref.WeakSet()

    def parts_of(indices, output):
        parts = [Part(index) for index in indices]
        alive.update(parts)
        return parts

    each = predict_each(
        task,
        Forward(task.model(), task.loss),
        Loader(MicroBatches(task.eval_data(), task, 0, training=False), 0, world.device),
        plan=EvaluationPlan(50, MICRO),
        world=world,
        precision=Precision("fp32", world.device),
        finish=parts_of,
    )
    found, most = [], 0
    for index, part in each:
        found.append((index, part.index))
        most = max(most, len(alive))
    assert found == [(index, index) for index in range(50)]
    assert most <= 2 * MICRO


@pytest.mark.cases("1", "2")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_outputs_come_in_the_order_of_the_samples_also_where_some_cannot_be_read(world):
    expected, *others = run_ranks(world, rank_cases.predict_each_of_files, 19, [0, 7, 8, 18], MICRO)
    assert others == [[]] * (world - 1)
    assert [index for index, _ in expected] == list(range(19))
    assert [index for index, what in expected if what] == [0, 7, 8, 18]
    assert expected[7][1].startswith("folder/007.png: sample 7 cannot be read: OSError: truncated file")
    assert "remedy" not in expected[7][1]
