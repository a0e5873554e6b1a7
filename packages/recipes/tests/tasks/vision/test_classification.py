"""The classification task on the embedded digits and on folders of images."""

import json
import os
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from lockstep import LockstepError, Trainer
from lockstep.configs import config_file
from lockstep.core.data.cache_options import CacheOptions
from lockstep_recipes.recipes.digits import Digits
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification
from lockstep_recipes.tasks.vision.readers.image_records import unlabelled_images
from tests import runs
from tests.image_cases import PHASES, RESNET, fit, fit_and_die, fit_to_the_end, make_task, picture_folder, results_of
from tests.ranks import RankFailed, run_ranks
from tests.selection import mainly

SHIFT = {"crop": "shift", "shift": 1, "flip": 0, "fill": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return picture_folder(tmp_path_factory.mktemp("pictures") / "train")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return picture_folder(tmp_path_factory.mktemp("pictures") / "eval", count=5, seed=1)


def digits(**options):
    return Classification(ClassificationOptions.model_validate({"channels": 1, **options}), "digits")


def prepared(task, index, epoch=0, training=True, seed=0):
    torch.manual_seed(seed)
    return task.prepare(task.train_data()[index], epoch, training)


# ---- data


def test_digits_are_the_uci_test_part_split_without_overlap():
    train, held_back = Digits(True), Digits(False)
    assert (len(train), len(held_back)) == (1437, 360)
    images = torch.cat([train.images, held_back.images])
    labels = np.concatenate([train.labels, held_back.labels]).tolist()
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI counts them
    assert [labels.count(digit) for digit in range(10)] == counts
    assert images.shape == (1797, 1, 8, 8)
    assert images.max() == 255
    pixel_sum = int((images.double() * 16 / 255).round().sum())
    assert pixel_sum == 561718  # of the original's integers 0 to 16


@pytest.mark.exhaustive
def test_digits_recipe_learns(tmp_path):
    results = Trainer("digits", run_dir=tmp_path, quiet=True).fit()
    assert results["eval/accuracy"] >= 0.97
    assert results["eval/samples"] == 360


def test_shift_moves_the_image_by_at_most_so_many_pixels():
    task = digits(augment=SHIFT)
    image = torch.zeros(1, 8, 8, dtype=torch.uint8)
    image[0, 4, 4] = 255
    places = set()
    for seed in range(200):
        torch.manual_seed(seed)
        item = task.prepare((image, 3), 0, training=True)
        assert (item["images"].shape, item["images"].dtype, item["labels"]) == ((1, 8, 8), torch.uint8, 3)
        ((_, row, column),) = (item["images"] == 255).nonzero().tolist()
        places.add((row, column))
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert torch.equal(task.prepare((image, 3), 0, training=False)["images"], image)


@pytest.mark.parametrize("label", [10, 255, -2])
def test_label_out_of_range_is_an_error(label):
    with pytest.raises(LockstepError, match=f"label {label} is out of range"):
        digits().prepare((torch.zeros(1, 8, 8, dtype=torch.uint8), label), 0, training=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "evaluation", "channels", "steps", "reference"),
    [
        ("fashion_mnist", "test", 1, 100, 0.7),
        ("bccd_cells", "val", 3, 60, 0.85),
    ],
)
def test_real_image_folders_train_and_predict_from_files(
    shared_data, tmp_path, name, evaluation, channels, steps, reference
):
    folder = shared_data / "classification" / name
    scratch = {"sizes": {"width": 16}}
    augment = {"crop": "resize", "flip": 0.0}
    settings = runs.config(
        task={
            "kind": "classification",
            "channels": channels,
            "image_size": 28,
            "scratch": scratch,
            "augment": augment,
            "top_k": 2,
        },
        schedule={"name": "cosine"},
        data={"train": str(folder)},  # it has folders `train` and `test` or `val`
        batch={"global": 50},
        train={"steps": steps, "eval_every_steps": steps},
    )
    trainer = Trainer(settings, run_dir=tmp_path, quiet=True)
    results = trainer.fit()
    assert results["eval/accuracy"] > reference
    assert results["eval/accuracy_top2"] >= results["eval/accuracy"]
    files = sorted((folder / evaluation).rglob("*.*"))[:3]
    rows = trainer.describe([str(path) for path in files])
    classes = {path.name for path in (folder / "train").iterdir()}
    assert [row["input"] for row in rows] == [str(path) for path in files]
    assert all(row["prediction"] in classes and len(row["top"]) == 2 for row in rows)
    assert all(row["top"][row["prediction"]] == row["probability"] == max(row["top"].values()) for row in rows)


def test_image_that_is_none_is_named(tmp_path):
    root = picture_folder(tmp_path / "train", count=1)
    (tmp_path / "train" / "red" / "bad.jpg").write_text("not an image")
    settings = runs.config(
        task={"kind": "classification"}, data={"train": root}, batch={"global": 4}, train={"steps": 2}
    )
    with pytest.raises(LockstepError, match=r"red/bad\.jpg"):
        Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()


def test_evaluation_class_unknown_to_training_is_an_error(folder, tmp_path):
    (tmp_path / "yellow").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "yellow" / "image.png")
    with pytest.raises(LockstepError, match="class 'yellow' is not among the 3 classes"):
        make_task({}, folder, str(tmp_path)).eval_data()


def test_a_single_class_is_an_error(tmp_path):
    (tmp_path / "only").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "only" / "image.png")
    with pytest.raises(LockstepError, match="only the class 'only'"):
        make_task({}, str(tmp_path)).model()


# ---- mixing


@pytest.mark.cases("options0")
@pytest.mark.parametrize("options", [{"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}])
def test_mixing_takes_images_and_labels_in_the_same_shares(folder, options):
    """Images of a single level, so that the share can be read from the mixed image."""
    task = make_task({**options, "image_size": 12, "augment": {"crop": "resize", "flip": 0}}, folder)
    levels = [40, 200, 100]

    class Flat:
        labels = np.arange(3)

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.full((3, 14, 18), levels[index], dtype=torch.uint8), index

    task.__dict__["_train"] = Flat()
    partners = set()
    for seed in range(60):
        item = prepared(task, 0, seed=seed)
        share, partner = item["label_share"], item["partner_labels"]
        assert item["labels"] == 0
        expected = share * levels[0] + (1 - share) * levels[partner]
        assert item["images"].float().mean().item() == pytest.approx(expected, abs=0.51)
        partners.add(partner)
    assert partners == {0, 1, 2}
    evaluated = prepared(task, 0, training=False)
    assert evaluated.keys() == {"images", "labels"}


def test_a_sample_is_the_same_whatever_was_prepared_before(folder):
    task = make_task({"mixup_alpha": 1.0, "cutmix_alpha": 1.0, "mix_probability": 0.7, "image_size": PHASES}, folder)
    alone = prepared(task, 7, epoch=1, seed=3)
    prepared(task, 2, epoch=0, seed=5)
    again = prepared(task, 7, epoch=1, seed=3)
    assert torch.equal(alone.pop("images"), again.pop("images"))
    assert alone == again


def test_a_partner_that_cannot_be_read_is_named(tmp_path):
    root = picture_folder(tmp_path / "train", count=2)
    bad = tmp_path / "train" / "green" / "001.png"
    bad.write_bytes(bad.read_bytes()[:60])
    task = make_task({"mixup_alpha": 1.0}, root)
    errors = []
    for seed in range(40):
        try:
            prepared(task, 0, seed=seed)
        except LockstepError as error:
            errors.append(str(error))
    assert errors
    assert all("partner for mixing" in text and "green/001.png" in text for text in errors)


# ---- the loss against plain torch


def batch_of(task, count=12):
    return task.collate([prepared(task, index, seed=index) for index in range(count)])


def plain_loss(task, model, batch, smoothing, weights=None):
    """Loss and units by torch's functions alone, with a soft target for each sample."""
    mean, std = (
        torch.tensor(part, dtype=torch.float64).reshape(1, 3, 1, 1) for part in (task.about.mean, task.about.std)
    )
    logits = model((batch["images"].double() / 255 - mean) / std)
    one_hot = functional.one_hot(batch["labels"], 3).double()
    if "partner_labels" in batch:
        share = batch["label_share"].double().unsqueeze(1)
        one_hot = share * one_hot + (1 - share) * functional.one_hot(batch["partner_labels"], 3)
    loss = functional.cross_entropy(logits, one_hot, weights, label_smoothing=smoothing, reduction="sum")
    return loss, float((one_hot * (1 if weights is None else weights)).sum())


@pytest.mark.cases("weights1-mixing0", "weights1-mixing2")
@pytest.mark.parametrize("smoothing", mainly([0.1], [0.0, 0.1]))
@pytest.mark.parametrize("mixing", [{}, {"mixup_alpha": 0.8}, {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}])
@pytest.mark.parametrize("weights", [None, {"red": 3.0, "blue": 0.5}])
def test_loss_and_gradient_are_those_of_cross_entropy_with_soft_targets(folder, mixing, smoothing, weights):
    task = make_task({**mixing, "label_smoothing": smoothing, "class_weights": weights, "image_size": 12}, folder)
    batch, by_class = batch_of(task), None if weights is None else torch.tensor([0.5, 1.0, 3.0]).double()
    torch.manual_seed(0)
    model = task.model().train()
    task.loss(model, batch)[0].backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected, units = plain_loss(task, model, batch, smoothing, by_class)
    expected.backward()
    with torch.no_grad():
        assert float(task.loss(model, batch)[0]) == pytest.approx(float(expected), rel=1e-6)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(grad, parameter.grad, rtol=1e-5, atol=1e-7)  # the mean and std have 32 bits in neither
    counted = task.weight(batch)
    assert (len(batch["labels"]) if counted is None else float(counted)) == pytest.approx(units, rel=1e-6)


def test_evaluation_has_neither_smoothing_nor_mixing(folder):
    task = make_task({"label_smoothing": 0.2, "mixup_alpha": 1.0, "image_size": 12}, folder)
    batch = task.collate([prepared(task, index, training=False) for index in range(6)])
    model = task.model().eval()
    with torch.no_grad():
        loss, output = task.loss(model, batch)
        expected, _ = plain_loss(task, model, batch, 0.0)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(output, task.predict(model, batch))


def test_balanced_weights_are_those_of_the_training_samples(tmp_path):
    root = picture_folder(tmp_path / "train", count=3)
    (tmp_path / "train" / "red" / "000.png").unlink()
    task = make_task({"class_weights": "balanced"}, root)
    assert torch.allclose(task._weights.tensor, torch.tensor([8 / 9, 8 / 9, 8 / 6]))
    with pytest.raises(LockstepError, match="no such label: 'pink'"):
        make_task({"class_weights": {"pink": 1.0}}, root).weight({"labels": torch.tensor([0])})


# ---- sizes by epoch


def test_training_pictures_have_the_size_of_the_epoch_and_evaluation_its_own(folder):
    task = make_task({"image_size": PHASES, "eval_size": 24, "eval_resize": 26}, folder)
    sizes = [prepared(task, 0, epoch=epoch)["images"].shape[-1] for epoch in range(4)]
    assert sizes == [12, 16, 20, 20]
    assert prepared(task, 0, epoch=0, training=False)["images"].shape == (3, 24, 24)
    assert task.presenter(task).epoch_header(1) == "image size 16"


def test_a_cut_larger_than_the_resized_picture_is_an_error_before_a_picture_is_read(folder):
    with pytest.raises(
        LockstepError, match=r"task\.eval_resize: images are resized to 30 pixels, but the crop needs 32"
    ):
        make_task({"eval_resize": 30}, folder, double=False).model()  # the convnet says 32


def test_with_steps_a_size_for_evaluation_that_is_never_reached_is_a_warning(folder, tmp_path):
    task = {"kind": "classification", "image_size": {0: 12, 50: 16}}
    settings = runs.config(task=task, data={"train": folder}, batch={"global": 10}, train={"steps": 4})
    Trainer(settings, run_dir=tmp_path, quiet=True).fit()
    log = (tmp_path / "train.log").read_text()
    assert "warning: task.image_size: 16 pixels from epoch 50 (counted from 0), but the run ends after 2 epochs" in log


def test_class_folders_alone_train_without_evaluation_and_a_warning_says_so(folder, tmp_path):
    overrides = ["task.eval_fraction=0", "train.epochs=1", "train.min_steps=1", "log.pictures=0"]
    settings = config_file.load("image_folder", [f"data.train={folder}", *overrides])
    results = Trainer(settings, run_dir=tmp_path, quiet=True).fit()
    assert not any(name.startswith("eval/") for name in results)
    log = (tmp_path / "train.log").read_text()
    assert "warning: nothing is evaluated, because there is no evaluation data: set data.eval" in log
    best = {"checkpoint": settings.checkpoint.model_copy(update={"keep_best": "max eval/accuracy"})}
    Trainer(settings.model_copy(update=best), run_dir=tmp_path / "best", quiet=True).fit()
    note = "note: the run never evaluates, so checkpoint.keep_best keeps no checkpoint"
    assert note in (tmp_path / "best" / "train.log").read_text()
    with pytest.raises(LockstepError, match=r"there is no evaluation data\n  remedy: set data\.eval"):
        Trainer(settings, run_dir=tmp_path, quiet=True).evaluate()


def test_a_share_of_every_class_is_held_back_where_no_evaluation_data_are_given(folder, held_out, tmp_path):
    options = {"eval_fraction": 0.25, "split_seed": 3}
    task = make_task(options, folder, double=False)
    training, held = task.train_data(), task.eval_data()
    every = {(sample.name, sample.label) for sample in make_task({}, folder, double=False).train_data()}
    parts = [{(sample.name, sample.label) for sample in part} for part in (training, held)]
    assert parts[0] | parts[1] == every
    assert not parts[0] & parts[1]
    counts = [np.bincount(part.records.labels) for part in (training, held)]
    shares = counts[1] / (counts[0] + counts[1])
    assert shares.tolist() == pytest.approx([0.25] * len(task.classes), abs=0.1)
    assert task.about.counts == counts[0].tolist()
    assert training.records.digest() != held.records.digest()  # each has a cache of its own
    assert held.where(0).endswith(held[0].name)
    again, other = (make_task(options | {"split_seed": seed}, folder, double=False).eval_data() for seed in (3, 4))
    assert [sample.name for sample in again] == [sample.name for sample in held]
    assert [sample.name for sample in other] != [sample.name for sample in held]
    line = f"{len(held)} of the {len(every)} images in {folder} are held back for evaluation"
    assert f"{line} (task.eval_fraction=0.25, task.split_seed=3)" in task.presenter(task).log_header()
    given = make_task(options, folder, held_out, double=False)
    assert len(given.train_data()) == len(every)  # evaluation data are given
    assert given.held_back is None
    # A run that goes on reads the classes from its folder, and has the same images.
    task.setup(tmp_path, trained=False)
    resumed = make_task(options, folder, double=False)
    resumed.setup(tmp_path, trained=True)
    assert [sample.name for sample in resumed.eval_data()] == [sample.name for sample in held]


def test_too_few_images_to_hold_back_one_are_said(tmp_path):
    task = make_task({"eval_fraction": 0.1}, picture_folder(tmp_path / "few", count=1), double=False)
    assert task.eval_data() is None
    assert any(line.startswith("no images of the 3 images in") for line in task.presenter(task).log_header())


@pytest.mark.parametrize(
    ("text", "remedies"),
    [
        (
            "{0},x\n{1},y\n",
            [("task.header=false", {"header": False, "columns": {"image": 0, "label": 1}})],
        ),
        ('path,label\n{0},"x\n{1},y\n', [("task.quoting=none", {"quoting": "none"})]),
    ],
)
def test_the_remedies_for_tables_are_options(folder, tmp_path, text, remedies):
    table = tmp_path / "table.csv"
    table.write_text(text.format(f"{folder}/red/000.png", f"{folder}/blue/000.png"))
    for remedy, options in remedies:
        with pytest.raises(LockstepError, match=re.escape(remedy)):
            make_task({}, str(table)).train_data()
        assert len(make_task(options, str(table)).train_data()) == 2


def test_a_list_of_labels_is_refused_with_a_remedy_that_exists(folder, tmp_path):
    table = tmp_path / "table.jsonl"
    table.write_text(json.dumps({"path": f"{folder}/red/000.png", "label": ["x", "y"]}))
    with pytest.raises(LockstepError, match="give each image one label") as caught:
        make_task({}, str(table)).train_data()
    assert "multi_label" not in str(caught.value)


def test_files_are_predicted_as_evaluation_pictures_are_with_a_reduced_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    options = ClassificationOptions.model_validate({"image_size": 20})
    task = Classification(options, folder, folder, CacheOptions(shorter_side=6))
    cached = task.eval_data()
    files = unlabelled_images([cached.records.pictures.path(index) for index in range(len(cached))])
    for index in range(len(cached)):
        expected, item = (task.prepare(data[index], 0, training=False)["images"] for data in (cached, files))
        assert torch.equal(item, expected)


def test_a_source_below_the_home_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", os.path.dirname(folder))
    config = config_file.load("image_folder", ["data.train=~/train", "data.eval=~/train"])
    task = Trainer(config, run_dir=tmp_path, quiet=True).task()
    assert (len(task.train_data()), len(task.eval_data())) == (30, 30)


EVERYTHING = {
    "image_size": PHASES,
    "mixup_alpha": 0.4,
    "cutmix_alpha": 1.0,
    "mix_probability": 0.8,
    "label_smoothing": 0.1,
    "scratch": RESNET,
    "batch_norm": "group",
    "augment": {"scale": [0.4, 1.0], "trivialaugment": True},
}


@pytest.mark.parametrize("world", mainly([2], [2, 3]))
def test_ranks_and_accumulation_change_nothing_while_the_size_changes(folder, world):
    settings = runs.config(batch={"global": 10}, train={"steps": 7}, optim={"lr": 0.003})  # an epoch is 3 steps
    (reference, _), *_ = run_ranks(1, fit, EVERYTHING, folder, None, settings)
    cut = settings | {"batch": {"global": 10, "micro": 2}}
    for weights, _ in run_ranks(world, fit, EVERYTHING, folder, None, cut):
        assert runs.difference(weights, reference) < 1e-10


def test_metrics_are_identical_on_any_number_of_ranks(folder, held_out):
    settings = runs.config(batch={"global": 6, "micro": 2}, train={"steps": 1, "eval_every_steps": 1})
    options = {"image_size": 12, "top_k": 2}
    frozen = settings | {"optim": {"name": "SGD", "lr": 1e-30}}
    (reference,) = run_ranks(1, results_of, options, folder, held_out, frozen)
    assert {"eval/accuracy", "eval/accuracy_top2", "eval/macro_f1", "eval/samples"} <= reference.keys()
    for world in (2, 3):
        for results in run_ranks(world, results_of, options, folder, held_out, frozen):
            assert results == reference


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "step", [pytest.param(2, marks=pytest.mark.exhaustive), 5, pytest.param(8, marks=pytest.mark.exhaustive)]
)
def test_a_run_killed_in_any_phase_ends_with_the_same_bits(folder, tmp_path, step):
    options = EVERYTHING | {"batch_norm": "batch"}
    settings = runs.config(
        batch={"global": 10, "micro": 5}, train={"steps": 9}, checkpoint={"every_steps": 1, "mode": "sync"}
    )
    (reference,) = run_ranks(1, fit_to_the_end, options, folder, settings, str(tmp_path / "whole"))
    with pytest.raises(RankFailed):
        run_ranks(1, fit_and_die, options, folder, settings, str(tmp_path / "killed"), step)
    (weights,) = run_ranks(1, fit_to_the_end, options, folder, settings, str(tmp_path / "killed"))
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


@pytest.mark.exhaustive
def test_a_cache_of_decoded_pictures_changes_no_bit(folder, tmp_path):
    augment = {"random_erasing": {"probability": 1.0}, "scale": [0.4, 1.0]}
    task = {"kind": "classification", **EVERYTHING, "augment": augment, "batch_norm": "batch"}
    settings = runs.config(
        task=task,
        data={"train": folder, "eval": folder},
        batch={"global": 10},
        train={"steps": 9, "eval_every_steps": 9},
    )
    results = []
    for name, data in (("plain", {}), ("cached", {"cache": "decoded"}), ("again", {"cache": "decoded"})):
        trainer = Trainer(settings | {"data": settings["data"] | data}, run_dir=tmp_path / name, quiet=True)
        trainer.fit()
        results.append(trainer.model.state_dict())
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0])


# ---- what the run keeps


def test_a_trained_run_predicts_and_exports_without_its_training_data(tmp_path):
    root = picture_folder(tmp_path / "train", count=3)
    settings = runs.config(
        task={"kind": "classification", "image_size": 12}, data={"train": root}, batch={"global": 4}, train={"steps": 2}
    )
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    (tmp_path / "train").rename(tmp_path / "moved")
    rows = trainer.describe([str(tmp_path / "moved" / "red")])
    assert len(rows) == 3
    assert rows[0]["prediction"] in ("blue", "green", "red")
    trainer.export(tmp_path / "out", program=False)
    about = json.loads((tmp_path / "out" / "classification.json").read_text())
    assert about["classes"] == ["blue", "green", "red"]
    assert about["mean"] == [0.485, 0.456, 0.406]


def test_mistakes_are_the_loss_of_each_sample():
    task = digits()
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    logits[3] = torch.tensor([0.0] + [-1e4] * 9)  # the probability of the label is zero
    labels = torch.tensor([1, 9, -1, 4, 0])
    found = task.presenter(task).mistakes(logits.softmax(1), {"labels": labels})
    expected = functional.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
    assert torch.allclose(found[[0, 1, 4]], expected[[0, 1, 4]])
    assert found[2] == -torch.inf
    assert 50 < found[3] < 200
    assert list(task.presenter(task).class_names()) == task.classes
