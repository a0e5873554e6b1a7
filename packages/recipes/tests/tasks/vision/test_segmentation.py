"""The segmentation task on small made-up images of different sizes."""

import io
import json
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from typer.testing import CliRunner

from lockstep import LockstepError, Trainer
from lockstep.cli import application as cli
from lockstep.configs import config_file
from lockstep.drawing import drawing
from lockstep_recipes.tasks.vision.readers import coco_masks, masked_images
from lockstep_recipes.tasks.vision.segmentation import counts
from lockstep_recipes.tasks.vision.segmentation.options import SegmentationOptions
from lockstep_recipes.tasks.vision.use_images import fitted_size
from tests import runs
from tests.mask_cases import (
    CLASSES,
    COLORS,
    UNET,
    described,
    fit,
    fit_and_die,
    fit_to_the_end,
    make_task,
    results_of,
    shapes_folder,
)
from tests.ranks import RankFailed, run_ranks
from tests.selection import mainly

ALL_LOSSES = {"losses": {"cross_entropy": 1.0, "dice": 0.5, "focal": 0.3, "lovasz": 0.7}, "class_weights": "balanced"}
AUGMENT = {"augment": {"scale": [0.3, 1.0], "trivialaugment": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shapes_folder(tmp_path_factory.mktemp("shapes"))


def evaluation_batch(task, indices):
    data = task.eval_data()
    return task.collate([task.prepare(data[index], 0, False) for index in indices])


def trained_model(task, seed=0):
    """A new model of which the last layer is far from zero, so that it predicts different classes."""
    torch.manual_seed(seed)
    model = task.model().eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(10)
    return model


# ---- samples and batches


def test_training_masks_are_ignored_where_no_pixel_of_the_picture_is(folder):
    task = make_task({"augment": {"crop": "shift", "shift": 12, "flip": 0}}, folder)
    sample = task.train_data()[1]
    whole = sample._replace(mask=np.ones_like(sample.mask))
    torch.manual_seed(3)
    item = task.prepare(whole, 0, True)
    assert (item["images"].shape, item["images"].dtype) == ((3, 32, 32), torch.uint8)
    assert (item["masks"].shape, item["masks"].dtype) == ((32, 32), torch.int16)
    assert set(item["masks"].unique().tolist()) == {-1, 1}
    empty = (item["images"] == 128).all(dim=0)
    assert empty[item["masks"] == -1].all()


def test_evaluation_keeps_masks_at_the_original_resolution(folder):
    task = make_task({"eval_size": 20}, folder)
    data = task.eval_data()
    batch = evaluation_batch(task, range(3))
    for number in range(3):
        height, width = data[number].mask.shape
        assert torch.equal(batch["masks"][number].long(), torch.from_numpy(data[number].mask).long())
        assert min(batch["images"][number].shape[1:]) == 20
        assert batch["places"][number] == (height, width, 0, 0, height, width)
    assert fitted_size((360, 480), 180) == (180, 240)
    assert fitted_size((480, 361), 180) == (239, 180)


def test_a_training_picture_without_a_mask_is_an_error(folder):
    task = make_task({}, folder)
    with pytest.raises(LockstepError, match="has no mask"):
        task.prepare(task.train_data()[0]._replace(mask=None), 0, True)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"eval_window": 64, "eval_size": 32}, "remove eval_size"),
        ({"eval_resize": 64}, "every pixel is evaluated"),
        ({"losses": {}}, "losses"),
        ({"losses": {"hinge": 1.0}}, "losses"),
    ],
)
def test_options_that_contradict_each_other_are_errors(options, what):
    with pytest.raises(ValueError, match=what):
        SegmentationOptions.model_validate(options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["task.losses=[dice]"], "task.losses: ['dice'] does not give factors; write {dice: 1.0}"),
        (["task.losses=dice"], "task.losses: 'dice' does not give factors; write {dice: 1.0}"),
        (["task.eval_window=64", "task.eval_size=32"], ": task: eval_window uses images at their own resolution"),
    ],
)
def test_errors_of_the_config_name_the_key(keys, message):
    with pytest.raises(LockstepError) as caught:
        config_file.load("segmentation", ["data.train=x", *keys])
    assert message in str(caught.value)


def test_unknown_sizes_of_the_network_are_errors(folder):
    for sizes, what in (({"wide": 8}, "takes: width, depth"), ({"norm": "layer"}, "use group or batch")):
        with pytest.raises(LockstepError, match=what):
            make_task({"scratch": {"sizes": sizes}}, folder).model()


# ---- losses and units


def plain_losses(logits, masks, weights):
    """Each loss by torch's functions in the most direct way, image by image and class by class."""
    found = dict.fromkeys(ALL_LOSSES["losses"], 0.0)
    for picture, mask in zip(logits, masks, strict=True):
        valid = mask >= 0
        labels, scores = mask[valid].long(), picture[:, valid].T
        if not len(labels):
            continue
        nll = functional.cross_entropy(scores, labels, reduction="none")
        found["cross_entropy"] += float((nll * weights[labels]).sum())
        found["focal"] += float(
            ((1 - scores.softmax(1).gather(1, labels[:, None])[:, 0]) ** 2 * nll * weights[labels]).sum()
        )
        dice, lovasz = [], []
        for number in labels.unique().tolist():
            share, truth = scores.softmax(1)[:, number], (labels == number).double()
            dice.append(float(1 - 2 * (share * truth).sum() / (share.sum() + truth.sum())))
            errors = (truth - share).abs()
            order = errors.argsort(descending=True)
            value, before = 0.0, 0.0
            for rank in range(1, len(order) + 1):  # the definition: the set function of the `rank` largest errors
                wrong = torch.zeros(len(order), dtype=torch.bool)
                wrong[order[:rank]] = True
                common, union = ((truth == 1) & ~wrong).sum(), ((truth == 1) | wrong).sum()
                after = 1 - float(common) / float(union)
                value, before = value + float(errors[order[rank - 1]]) * (after - before), after
            lovasz.append(value)
        found["dice"] += sum(dice) / len(dice)
        found["lovasz"] += sum(lovasz) / len(lovasz)
    return found


def test_losses_are_their_definitions_and_units_come_from_labels_alone(folder):
    task = make_task({**ALL_LOSSES, "image_size": 16}, folder)
    batch = task.collate([task.prepare(task.train_data()[index], 0, True) for index in range(4)])
    batch["masks"][2] = -1
    model = trained_model(task)
    with torch.no_grad():
        found, _ = task.loss(model, batch)
        logits = task._logits(model, batch["images"])
        logits = functional.interpolate(logits, size=(16, 16), mode="bilinear")
    expected = plain_losses(logits, batch["masks"], task._weights.tensor.double())
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-6), name  # class weights have 32 bits
    weight = task.weight(batch)
    valid = batch["masks"][batch["masks"] >= 0].long()
    assert float(weight["cross_entropy"]) == pytest.approx(float(task._weights.tensor[valid].double().sum()))
    assert int(weight["dice"]) == int(weight["lovasz"]) == 3


def test_a_batch_without_valid_pixels_has_a_loss_of_zero_with_a_gradient(folder):
    task = make_task(ALL_LOSSES, folder)
    batch = task.collate([task.prepare(task.train_data()[0], 0, True)])
    batch["masks"].fill_(-1)
    model = task.model()
    found, _ = task.loss(model, batch)
    sum(found.values()).backward()
    assert all(float(value.detach()) == 0 for value in found.values())
    assert all(float(value) == 0 for value in task.weight(batch).values())
    assert all(bool(parameter.grad.eq(0).all()) for parameter in model.parameters())


def test_balanced_weights_are_those_of_the_training_pixels(folder):
    data = make_task({}, folder).train_data()
    valid = np.concatenate([data[index].mask[data[index].mask >= 0] for index in range(12)])
    pixels = torch.from_numpy(np.bincount(valid)).double()
    balanced = pixels.sum() / (3 * pixels)
    assert torch.allclose(make_task({"class_weights": "balanced"}, folder)._weights.tensor.double(), balanced)
    assert torch.allclose(
        make_task({"class_weights": "balanced_sqrt"}, folder)._weights.tensor.double(), balanced.sqrt()
    )
    assert make_task({"class_weights": {"disc": 4.0}}, folder)._weights.tensor.tolist() == [1, 4, 1]


def test_balanced_weights_count_all_masks(folder, monkeypatch):
    whole = make_task({"class_weights": "balanced"}, folder)._weights.tensor
    monkeypatch.setattr(masked_images, "MOST_CHECKED", 3)
    plain, balanced = make_task({}, folder), make_task({"class_weights": "balanced"}, folder)
    assert (plain.about.masks, balanced.about.masks) == (3, 12)
    assert torch.equal(balanced._weights.tensor, whole)


def test_a_class_without_training_pixels_has_the_weight_one(folder):
    classes = [*CLASSES, "triangle"]
    weights = make_task({"class_weights": "balanced", "classes": classes, "ignore": [255]}, folder)._weights.tensor
    assert weights[3] == 1
    assert bool((weights[:3] != 1).all())


# ---- evaluation


@pytest.mark.parametrize(
    "options", mainly([{"eval_window": 24}], [{}, {"eval_size": 20}, {"eval_window": 24}, {"flip_at_evaluation": True}])
)
def test_a_result_does_not_depend_on_the_other_pictures_of_a_batch(folder, options):
    task = make_task(options, folder)
    model = trained_model(task)
    count = len(task.eval_data())
    with torch.no_grad():
        loss, together = task.loss(model, evaluation_batch(task, range(count)))
        alone = [task.loss(model, evaluation_batch(task, [index])) for index in range(count)]
    for one, (_, (other,)) in zip(together, alone, strict=True):
        assert torch.equal(one["classes"], other["classes"])
    assert float(loss) == pytest.approx(sum(float(value) for value, _ in alone), rel=1e-12)


def test_miou_is_that_of_the_confusion_matrix_of_scikit_learn(folder):
    metrics = pytest.importorskip("sklearn.metrics")
    task = make_task({}, folder)
    model = trained_model(task)
    collection = task.metrics()
    truth, told = [], []
    for indices in ([0, 1, 2], [3, 4], [5, 6]):
        batch = evaluation_batch(task, indices)
        with torch.no_grad():
            output = task.predict(model, batch)
        collection.update(_Direct(collection.metrics), output, batch)
        for part, mask in zip(output, batch["masks"], strict=True):
            assert part["classes"].shape == mask.shape
            truth.append(mask[mask >= 0])
            told.append(part["classes"][mask >= 0])
    matrix = metrics.confusion_matrix(torch.cat(truth), torch.cat(told), labels=[0, 1, 2])
    values = collection.metrics["pixels"].compute()
    assert (values["confusion"].numpy() == matrix).all()
    iou = np.diag(matrix) / (matrix.sum(0) + matrix.sum(1) - np.diag(matrix))
    assert values["miou"] == pytest.approx(iou.mean(), abs=1e-15)
    assert [values[f"iou/{name}"] for name in CLASSES] == pytest.approx(iou)
    assert values["pixel_accuracy"] == pytest.approx(np.diag(matrix).sum() / matrix.sum())
    jaccard = metrics.jaccard_score(torch.cat(truth), torch.cat(told), average="macro")
    assert values["miou"] == pytest.approx(jaccard)


class _Direct:
    """Passes updates on to the only metric, as a MetricCollection does."""

    def __init__(self, metrics):
        self.metrics = metrics

    def update(self, *arguments):
        self.metrics["pixels"].update(*arguments)


def test_mirror_images_give_the_mean_of_two_probabilities(folder):
    task, plain = make_task({"flip_at_evaluation": True}, folder), make_task({}, folder)
    model = trained_model(task)
    batch = evaluation_batch(task, [2])
    image = batch["images"][0][None]
    with torch.no_grad():
        one = plain._logits(model, image).softmax(1)
        other = plain._logits(model, image.flip(-1)).softmax(1).flip(-1)
        found = task.logits_of_equal(model, image).exp()
    assert torch.allclose(found, (one + other) / 2, atol=1e-12)


# ---- windows


def test_a_large_picture_is_stitched_from_the_cores_that_an_evaluation_counts(folder):
    """Predicting a whole image and evaluating its windows as samples of their own give the same classes."""
    task = make_task({"eval_window": 24, "eval_overlap": 0.4}, folder)
    model, windows = trained_model(task), task.eval_data()
    assert len(windows) > len(windows.pictures)
    for number, sample in enumerate(windows.pictures):
        batch = task.collate([task.prepare(sample, 0, False)])
        with torch.no_grad():
            (whole,) = task.predict(model, batch)
        stitched = torch.full(sample.mask.shape, 99, dtype=torch.uint8)
        for index in range(windows.first[number], windows.first[number + 1]):
            window = windows[index]
            item = task.collate([task.prepare(window, 0, False)])
            with torch.no_grad():
                (part,) = task.predict(model, item)
            top, left, height, width = window.tile.core
            assert torch.equal(
                item["masks"][0].long(), torch.from_numpy(sample.mask).long()[top : top + height, left : left + width]
            )
            stitched[top : top + height, left : left + width] = part["classes"]
        assert torch.equal(whole["classes"], stitched)


# ---- ranks, metrics, recovery


@pytest.mark.parametrize(
    "options",
    [pytest.param(AUGMENT, marks=pytest.mark.exhaustive), ALL_LOSSES | AUGMENT | {"label_smoothing": 0.1}],
)
@pytest.mark.parametrize(("world", "micro"), mainly([(2, 1)], [(2, 3), (2, 1), (3, 2)]))
def test_ranks_and_accumulation_change_nothing(folder, options, world, micro):
    settings = runs.config(batch={"global": 6}, train={"steps": 4}, optim={"lr": 0.003})
    (reference, _), *_ = run_ranks(1, fit, options, folder, settings)
    cut = settings | {"batch": {"global": 6, "micro": micro}}
    for weights, _ in run_ranks(world, fit, options, folder, cut):
        assert runs.difference(weights, reference) < 1e-10


@pytest.mark.cases("options1")
@pytest.mark.parametrize("world", mainly([3], [2, 3]))
@pytest.mark.parametrize("options", [{}, ALL_LOSSES | {"eval_window": 24}])
def test_metrics_are_identical_on_any_number_of_ranks(folder, options, world):
    settings = runs.config(
        batch={"global": 6, "micro": 2},
        train={"steps": 1, "eval_every_steps": 1},
        optim={"name": "SGD", "lr": 1e-30},
    )
    (reference,) = run_ranks(1, results_of, options, folder, settings)
    wanted = {"eval/miou", "eval/pixel_accuracy", "eval/boundary_f1", "eval/iou/ground", "eval/loss"}
    assert wanted <= reference.keys()
    reference.pop("eval/memory", None)
    for results in run_ranks(world, results_of, options, folder, settings):
        assert results == reference


@pytest.mark.exhaustive
def test_fsdp_evaluates_pictures_of_several_sizes_as_ddp(folder):
    """The ranks call the model in different numbers: once for each size of images in a batch."""
    settings = runs.config(
        batch={"global": 6, "micro": 2},
        train={"steps": 1, "eval_every_steps": 1},
        optim={"name": "SGD", "lr": 1e-30},
    )
    (reference, _) = run_ranks(2, results_of, {}, folder, settings)
    assert "eval/miou" in reference
    sharded = settings | {"parallel": {"strategy": "fsdp"}}
    for results in run_ranks(2, results_of, {}, folder, sharded):
        assert without_memory(results) == without_memory(reference)


def without_memory(results):
    return {name: value for name, value in results.items() if "memory" not in name}


@pytest.mark.exhaustive
def test_fsdp_predicts_pictures_of_several_sizes_window_by_window(folder, tmp_path):
    found = []
    for strategy in ("ddp", "fsdp"):
        settings = runs.config(batch={"global": 6, "micro": 2}, train={"steps": 1}, parallel={"strategy": strategy})
        pictures = f"{folder}/val/images"
        run_dir = str(tmp_path / strategy)
        rows, _ = run_ranks(2, described, {"eval_window": 24, "eval_overlap": 0.4}, folder, settings, run_dir, pictures)
        found.append(rows)
    assert len(found[0]) == 7
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path):
    settings = runs.config(
        batch={"global": 6, "micro": 3}, train={"steps": 5}, checkpoint={"every_steps": 1, "mode": "sync"}
    )
    options = AUGMENT | ALL_LOSSES
    (reference,) = run_ranks(1, fit_to_the_end, options, folder, settings, str(tmp_path / "whole"))
    with pytest.raises(RankFailed):
        run_ranks(1, fit_and_die, options, folder, settings, str(tmp_path / "killed"), 4)
    (weights,) = run_ranks(1, fit_to_the_end, options, folder, settings, str(tmp_path / "killed"))
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


@pytest.mark.exhaustive
def test_the_task_learns_and_shows_what_it_learned(folder, tmp_path):
    task = make_task({}, folder, double=False)
    settings = runs.config(batch={"global": 6}, train={"steps": 40, "eval_every_steps": 40}, log={"pictures": 8})
    results = Trainer(settings, run_dir=tmp_path, quiet=True).fit(task)
    assert results["eval/miou"] > 0.6
    assert (tmp_path / "samples" / "augmented.png").exists()
    assert (tmp_path / "samples" / "step-00000040.png").exists()
    assert (tmp_path / "pictures" / "confusion-step-00000040.png").exists()
    log = (tmp_path / "train.log").read_text()
    assert "evaluation: images at their own size; counted at the original resolution" in log
    assert "disc" in log


# ---- data: cache, grey images, classes


@pytest.mark.exhaustive
def test_a_cache_of_decoded_pictures_changes_no_bit(folder, tmp_path):
    task = {"kind": "segmentation", "scratch": UNET, "image_size": 32, **AUGMENT}
    settings = runs.config(
        task=task, data={"train": folder}, batch={"global": 6}, train={"steps": 4, "eval_every_steps": 4}
    )
    found = []
    for name, data in (("plain", {}), ("cached", {"cache": "decoded"}), ("again", {"cache": "decoded"})):
        trainer = Trainer(settings | {"data": settings["data"] | data}, run_dir=tmp_path / name, quiet=True)
        results = trainer.fit()
        found.append((trainer.model.state_dict(), results["eval/miou"]))
        assert ("decoded images: " in (tmp_path / name / "train.log").read_text()) == bool(data)
    for weights, miou in found[1:]:
        assert miou == found[0][1]
        assert all(torch.equal(found[0][0][name], weights[name]) for name in weights)


def test_grey_pictures_train_and_are_evaluated(folder, tmp_path):
    task = make_task({"channels": 1}, folder, double=False)
    assert task.train_data()[0].pixels.shape[2] == 1
    settings = runs.config(batch={"global": 6}, train={"steps": 2, "eval_every_steps": 2})
    assert "eval/miou" in Trainer(settings, run_dir=tmp_path, quiet=True).fit(task)


def test_classes_that_only_evaluation_masks_have_are_named_in_the_log(tmp_path):
    folder = shapes_folder(tmp_path / "data")
    for path in (tmp_path / "data/train/masks").iterdir():
        mask = np.array(Image.open(path))
        Image.fromarray(np.where(mask == 2, 0, mask)).save(path)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(["earth", "disc", "bar"]))
    task = make_task({"classes": str(names), "ignore": [255]}, folder, double=False)
    Trainer(runs.config(batch={"global": 6}, train={"steps": 1}), run_dir=tmp_path / "run", quiet=True).fit(task)
    assert task.classes == ["earth", "disc", "bar"]
    log = (tmp_path / "run/train.log").read_text()
    assert "these classes of the evaluation masks do not occur in training masks: bar" in log


@pytest.mark.exhaustive
def test_street_scenes_train_and_are_predicted(shared_data, tmp_path):
    """CamVid: 11 classes, and the id 11 is ignored."""
    source = shared_data / "segmentation" / "camvid"
    task = {"kind": "segmentation", "scratch": UNET, "image_size": 64, "eval_size": 64, "boundary_tolerance": None}
    settings = runs.config(
        task=task, data={"train": str(source)}, batch={"global": 4}, train={"steps": 3, "eval_every_steps": 3}
    )
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    results = trainer.fit()
    assert trainer.model.head.out_channels == 11
    assert "eval/iou/Unlabelled" not in results
    assert 0 <= results["eval/miou"] < 0.5
    pictures = sorted((source / "val/images").iterdir())[:2]
    arguments = ["predict", tmp_path / "run", *pictures, "--out", f"{tmp_path / 'out'}/"]
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    for picture in pictures:
        with Image.open(tmp_path / "out/masks" / f"{picture.stem}.png") as mask, Image.open(picture) as image:
            assert mask.size == image.size
            assert np.array(mask).max() < 11
        assert (tmp_path / "out/overlays" / f"{picture.stem}.png").is_file()


# ---- what people see


def test_files_of_a_prediction_hold_the_classes_and_are_drawn_in_their_colours(folder):
    task = make_task({}, folder)
    presenter, sample = task.presenter(task), task.eval_data()[1]
    with torch.no_grad():
        (output,) = task.predict(trained_model(task), evaluation_batch(task, [1]))
    files = presenter.files(sample, output)
    mask = Image.open(io.BytesIO(files["masks/*.png"]))
    assert mask.mode == "L"  # as the masks of the training data
    assert (np.asarray(mask) == output["classes"].numpy()).all()
    overlay = Image.open(io.BytesIO(files["overlays/*.png"]))
    assert overlay.height > mask.height  # the legend
    colors = drawing.distinct(COLORS)
    assert colors[1:].tolist() == list(COLORS[1:])  # the black of the first class is another colour
    plain = drawing.colored_mask(sample.pixels, output["classes"].numpy(), colors, 0.55)
    assert (np.asarray(overlay)[: mask.height, : mask.width] == plain).all()
    described = presenter.describe(output)
    assert (described["height"], described["width"]) == sample.mask.shape
    assert sum(described["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert sum(presenter.truth(sample).values()) == pytest.approx(1, abs=1e-3)


PALETTE = [10, 20, 30, 200, 0, 0, 0, 200, 0, *[7] * 759]
# mask files by class number; the classes; the values that predicted masks have
OWN_VALUES = {
    "0 and 255": (lambda numbers: np.array([0, 255, 128], np.uint8)[numbers], {"a": 0, "b": 255, "c": 128}),
    "16 bits": (lambda numbers: np.array([7, 1000, 40], np.uint16)[numbers], {"a": 7, "b": 1000, "c": 40}),
    "32 bits": (lambda numbers: np.array([7, 70000, 4], np.int32)[numbers], {"a": 7, "b": 70000, "c": 4}),
    "palette": (lambda numbers: np.array([0, 2, 1], np.uint8)[numbers], {"a": 0, "b": 2, "c": 1}),
    "colours": (
        lambda numbers: np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.uint8)[numbers],
        {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]},
    ),
}


@pytest.mark.cases("palette", "colours")
@pytest.mark.parametrize("kind", OWN_VALUES)
def test_predicted_masks_have_the_values_of_the_training_masks(tmp_path, kind):
    """And the export says them."""
    values, classes = OWN_VALUES[kind]
    numbers = np.arange(30 * 40).reshape(30, 40) % 3
    for place in ("images", "masks"):
        (tmp_path / place).mkdir()
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(tmp_path / "images/a.png")
    mask, suffix = Image.fromarray(values(numbers)), ".tiff" if kind == "32 bits" else ".png"
    if kind == "palette":
        mask.putpalette(PALETTE)
    mask.save(tmp_path / f"masks/a{suffix}")
    task = make_task({"classes": classes}, str(tmp_path))
    task.setup(tmp_path / "kept", trained=False)
    presenter = task.presenter(task)
    files = presenter.files(task.train_data()[0], {"classes": torch.from_numpy(numbers.astype(np.uint8))})
    written = Image.open(io.BytesIO(files[f"masks/*{suffix}"]))
    own = Image.open(tmp_path / f"masks/a{suffix}")
    assert written.mode == own.mode
    assert np.array_equal(np.asarray(written), np.asarray(own))
    if kind == "palette":
        assert written.getpalette()[:9] == PALETTE[:9]
    (tmp_path / "out").mkdir()
    presenter.export(task.model(), tmp_path / "out")
    exported = json.loads((tmp_path / "out/segmentation.json").read_text())
    said = exported["colors" if kind == "colours" else "ids"]
    assert dict(zip(exported["classes"], said, strict=True)) == classes


def test_predicted_masks_of_coco_data_have_the_ids_of_the_categories():
    annotations = types.SimpleNamespace(classes=("cat", "dog"), category_ids=np.array([3, 17]))
    masks = coco_masks.CocoMasks(annotations, np.array([1, 2]), background=0, images=None)
    assert masks.form().ids == {"background": 0, "cat": 3, "dog": 17}
    annotations.category_ids = np.array([0, 17])
    assert masks.form().ids == {"background": 18, "cat": 0, "dog": 17}


@pytest.mark.parametrize("options", [{}, {"eval_window": 24}])
def test_mistakes_are_shares_of_wrong_pixels_of_each_picture(folder, options):
    task = make_task(options, folder)
    batch = evaluation_batch(task, range(4))
    batch["masks"][3] = torch.full_like(batch["masks"][3], -1)
    with torch.no_grad():
        output = task.predict(trained_model(task), batch)
    found = task.presenter(task).mistakes(output, batch)
    for number in range(3):
        mask, told = batch["masks"][number], output[number]["classes"]
        valid = mask >= 0
        share = float((told[valid].long() != mask[valid].long()).double().mean())
        assert float(found[number]) == pytest.approx(share, abs=1e-12)
    assert float(found[3]) == -np.inf
    picture = task.presenter(task).picture(task.eval_data()[1], None, output[1])
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3


# ---- counts


def test_boundary_counts_are_those_of_a_direct_search():
    draw = np.random.default_rng(0)
    for size, tolerance in (((20, 26), 1), ((17, 31), 3), ((9, 9), 2)):
        truth, told = (
            torch.from_numpy(np.kron(draw.integers(0, 3, (5, 8)), np.ones((4, 4)))[: size[0], : size[1]]).to(
                torch.int16
            )
            for _ in range(2)
        )
        truth[2:5, 3:9] = -1
        found = counts.boundary_counts(told, truth, 3, tolerance)
        shown = torch.where(truth < 0, truth, told)
        assert found.tolist() == direct_boundaries(truth.numpy(), shown.numpy(), tolerance)


def direct_boundaries(truth, told, tolerance):
    def edges(labels, number):
        found = []
        for row, column in np.argwhere(labels == number):
            near = [(row + down, column + across) for down, across in ((0, 1), (0, -1), (1, 0), (-1, 0))]
            inside = [place for place in near if 0 <= place[0] < labels.shape[0] and 0 <= place[1] < labels.shape[1]]
            if any(labels[place] not in (-1, number) for place in inside):
                found.append((row, column))
        return np.array(found).reshape(-1, 2)

    rows = [[], [], [], []]
    for number in range(3):
        true, said = edges(truth, number), edges(told, number)
        apart = ((true[:, None] - said[None]) ** 2).sum(-1) <= tolerance**2
        for row, value in zip(rows, (len(true), apart.any(1).sum(), len(said), apart.any(0).sum()), strict=True):
            row.append(int(value))
    return rows


def test_a_perfect_prediction_has_the_highest_scores(folder):
    mask = torch.from_numpy(make_task({}, folder).train_data()[1].mask)
    matrix = counts.confusion(mask.clamp(min=0), mask, 3)
    assert counts.summarise(matrix, CLASSES)["miou"] == 1
    assert counts.boundary_f1(counts.boundary_counts(mask.clamp(min=0), mask, 3, 1)) == 1


def test_an_evaluation_without_valid_pixels_has_no_numbers_and_says_so(tmp_path):
    folder = shapes_folder(tmp_path / "data")
    for path in (tmp_path / "data/val/masks").iterdir():
        with Image.open(path) as mask:
            size = mask.size
        Image.new("L", size, 255).save(path)
    settings = runs.config(batch={"global": 6}, train={"steps": 1, "eval_every_steps": 1})
    results = Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit(make_task({}, folder, double=False))
    assert {name for name in results if name.startswith("eval/")} <= {"eval/samples", "eval/bad", "eval/memory"}
    log = (tmp_path / "run/train.log").read_text()
    assert log.count("every pixel of the evaluation masks is ignored") == 1
