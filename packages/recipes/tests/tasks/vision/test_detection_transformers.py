"""Detectors of transformers: their own losses as sums, the same training on every number of ranks, and their boxes."""

import contextlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.loss import loss_d_fine, loss_utils

from lockstep import LockstepError
from lockstep.core.data.order import permute
from lockstep_recipes.tasks.vision.batch_norm import exchange_batch_norm
from lockstep_recipes.tasks.vision.detection.transformers_boxes import inside_of, labels_of, stretch
from tests import detector_cases, runs
from tests.detector_cases import CLASSES, SIZE, SIZES, models_of, targets_of
from tests.ranks import run_ranks
from tests.selection import mainly

UNEVEN = [3, 0, 9, 1]  # images without boxes, and with more boxes than the models have queries
EQUAL = [2, 2, 2]


@contextlib.contextmanager
def in_float64():
    """Make transformers' own losses work in float64, which they are not made for."""
    distances = loss_d_fine.bbox2distance

    def in_float32(points, boxes, bins, scale, up):
        return distances(points.float(), boxes.float(), bins, scale, up.float())

    loss_d_fine.bbox2distance = in_float32
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        loss_d_fine.bbox2distance = distances


def made(architecture, **sizes):
    """A model in float64, and what knows its losses. BatchNorm layers are in evaluation mode."""
    torch.manual_seed(0)
    models = models_of(architecture, **sizes)
    model, _ = models.make(CLASSES, size=SIZE, trained=False)
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return models, model


def own_loss(model, images, targets, **inputs):
    """The loss that transformers itself computes for a batch, and its parts."""
    ours = model.loss_function
    model.loss_function = loss_utils.LOSS_MAPPING[model.loss_type]
    with in_float64():
        output = model(pixel_values=images, labels=labels_of(targets, images.dtype), **inputs)
    model.loss_function = ours
    return output.loss, output.loss_dict


def mean_loss(models, model, images, targets):
    """The loss of a batch that is the global batch, and the means by head."""
    outputs = models.forward(model, images, targets.shapes, targets)
    sums, units = models.losses(model, outputs, targets), models.weights(targets)
    assert sums.keys() == units.keys()
    means = {head: sums[head] / units[head] for head in sums if units[head]}
    return sum(models.coefficients()[head] * mean for head, mean in means.items()), means


@pytest.mark.cases("detr-uneven", "rt_detr-uneven")
@pytest.mark.parametrize("counts", [EQUAL, UNEVEN], ids=["equal", "uneven"])
@pytest.mark.parametrize("architecture", mainly(["detr", "rt_detr"], SIZES))
def test_loss_of_one_batch_is_that_of_transformers(architecture, counts):
    models, model = made(architecture)
    targets = targets_of(counts)
    images = torch.randn(len(counts), 3, SIZE, SIZE).double()
    expected, parts = own_loss(model, images, targets)
    loss, means = mean_loss(models, model, images, targets)
    if architecture == "d_fine" and counts == UNEVEN:  # the one head that transformers does not divide by boxes
        distillation = models.coefficients()["distillation"] * means["distillation"]
        theirs = sum(value for name, value in parts.items() if name.startswith("loss_ddf"))
        loss, expected = loss - distillation, expected - theirs
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    gradients = torch.autograd.grad(loss, trained.values())
    for name, one, other in zip(trained, gradients, torch.autograd.grad(expected, trained.values()), strict=True):
        assert (one - other).norm() <= 1e-10 * max(float(other.norm()), 1e-6), name


@pytest.mark.cases("detr", "rt_detr")
@pytest.mark.parametrize("architecture", mainly(["detr", "rt_detr"], SIZES))
def test_loss_in_evaluation_is_that_of_transformers(architecture):
    models, model = made(architecture)
    model.eval()
    targets = targets_of(EQUAL)
    images = torch.randn(len(EQUAL), 3, SIZE, SIZE).double()
    expected, _ = own_loss(model, images, targets)
    outputs = models.forward(model, images, targets.shapes, None)
    sums, units = models.losses(model, outputs, targets), models.weights(targets)
    loss = sum(factor * sums[head] / units[head] for head, factor in models.coefficients().items())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("architecture", mainly(["rt_detr"], ["rt_detr", "rt_detr_v2", "d_fine"]))
def test_loss_with_denoised_boxes_is_that_of_transformers(architecture):
    models, model = made(architecture, num_denoising=8)
    targets = targets_of(EQUAL)
    images = torch.randn(len(EQUAL), 3, SIZE, SIZE).double()
    torch.manual_seed(1)
    expected, _ = own_loss(model, images, targets)
    torch.manual_seed(1)
    with in_float64():  # so that the same numbers are drawn
        loss, _ = mean_loss(models, model, images, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.cases("detr", "rt_detr")
@pytest.mark.parametrize("architecture", mainly(["detr", "rt_detr"], SIZES))
def test_batch_without_boxes_has_a_gradient_of_every_parameter(architecture):
    sizes = {"num_denoising": 8} if "num_denoising" in SIZES[architecture] else {}
    models, model = made(architecture, **sizes)
    targets = targets_of([0, 0])
    outputs = models.forward(model, torch.randn(2, 3, SIZE, SIZE).double(), targets.shapes, targets)
    sums = models.losses(model, outputs, targets)
    assert sums.keys() == models.weights(targets).keys()
    assert sums["class"].item() > 0
    assert sums["box"].item() == sums["giou"].item() == 0
    sum(sums.values()).backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []


def by_hand(task, steps, global_batch):
    """Train in plain torch with transformers' own parts: one process, the whole global batch at once."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = task.train_data()
    per_epoch = len(data) // global_batch
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        positions = np.arange(within * global_batch, (within + 1) * global_batch)
        batch = task.collate([data[int(index)] for index in permute(positions, len(data), 0, epoch)])
        targets = task.targets(batch)
        loss, _ = own_loss(model, batch["images"], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def apart(one, other):
    """The largest relative difference of any tensor. Biases of attention keys have no gradient but rounding, and begin
    at zero: tensors as small as these are compared by their absolute difference."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / max(float(other[name].norm()), 1e-4)) for name in one)


OPTIM = {"name": "SGD", "lr": 0.01, "weight_decay": 0.0}


# transformers rounds some targets of D-FINE to float32, which grows from step to step.
@pytest.mark.parametrize(
    ("architecture", "steps"),
    mainly(
        [("rt_detr", 3)],
        [("detr", 4), ("yolos", 4), ("deformable_detr", 4), ("rt_detr", 3), ("d_fine", 1)],
    ),
)
@pytest.mark.parametrize("micro", mainly([2], [4, 2]))
def test_weights_are_the_same_on_every_number_of_ranks(architecture, steps, micro):
    settings = {"train": {"steps": steps}, "optim": OPTIM}
    (one, _) = detector_cases.trained(architecture, runs.config(batch={"global": 8, "micro": 8}, **settings))
    if architecture != "d_fine":  # its distillation has other units
        expected = by_hand(detector_cases.Detectors(architecture), steps=steps, global_batch=8)
        assert apart(one, expected) < 1e-10
    cut = runs.config(batch={"global": 8, "micro": micro}, **settings)
    for weights, _ in run_ranks(2, detector_cases.trained, architecture, cut):
        assert apart(weights, one) < 1e-10


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_ranks_without_boxes_train_with_denoising(strategy):
    settings = runs.config(
        batch={"global": 4, "micro": 1}, train={"steps": 4}, optim=OPTIM, parallel={"strategy": strategy}
    )
    one, two = run_ranks(2, detector_cases.trained_with_denoising, "rt_detr", settings)
    assert apart(one, two) == 0


@pytest.mark.exhaustive  # as test_evaluate.py with a model of transformers
def test_evaluated_losses_are_the_same_on_every_number_of_ranks(tmp_path):
    settings = runs.config(batch={"global": 8, "micro": 4}, train={"steps": 2, "eval_every_steps": 2}, optim=OPTIM)
    (_, one) = detector_cases.trained("rt_detr", settings)
    for _, results in run_ranks(2, detector_cases.trained, "rt_detr", settings):
        if results:
            for head in ("class", "box", "giou"):
                name = next(key for key in one if key.startswith("eval/") and key.endswith(head))
                assert results.get(name, one[name]) == pytest.approx(one[name], rel=1e-10)


@pytest.mark.parametrize("architecture", mainly(["detr", "rt_detr"], SIZES))
def test_boxes_are_those_of_the_image_processor(architecture):
    models, model = made(architecture)
    model.eval()
    shapes = torch.tensor([[64, 48], [32, 64]])
    images = torch.randn(2, 3, SIZE, SIZE).double()
    with torch.no_grad():
        outputs = models.forward(model, images, shapes, None)
        found = models.detections(model, outputs, size=(SIZE, SIZE), most=4)
    predictions = outputs.predictions
    processor = models._family.processor
    whole = transformers.models.auto.image_processing_auto.get_image_processor_class_from_name(f"{processor}Pil")()
    raw = type("Raw", (), {"logits": predictions.logits, "pred_boxes": predictions.boxes})
    expected = whole.post_process_object_detection(raw, threshold=0.0, target_sizes=shapes)
    for number, one in enumerate(expected):
        best = one["scores"].argsort(descending=True)[:4]
        assert torch.allclose(found.scores[number], one["scores"][best].float(), atol=1e-6)
        assert torch.equal(found.labels[number], one["labels"][best])
        assert torch.allclose(found.boxes[number], one["boxes"][best].float(), atol=1e-4)


def test_padding_is_masked_or_cut_off():
    shapes = torch.tensor([[2, 3], [4, 4]])
    inside = inside_of(shapes, (4, 4))
    assert inside.sum((1, 2)).tolist() == [6, 16]
    assert inside[0, :2, :3].all()
    images = torch.arange(32.0).reshape(2, 1, 4, 4)
    stretched = stretch(images, shapes)
    assert torch.equal(stretched[1], images[1])
    assert stretched[0].max() == images[0, 0, 1, 2]  # nothing of the padding is seen


@pytest.mark.parametrize("architecture", ["detr", "deformable_detr"])
def test_content_of_the_padding_does_not_matter(architecture):
    models, model = made(architecture)
    model.eval()
    shapes = torch.tensor([[64, 40]])
    images = torch.randn(1, 3, SIZE, SIZE).double()
    other = images.clone()
    other[..., 40:] = 5.0
    with torch.no_grad():
        one, two = (models.forward(model, pictures, shapes, None).predictions for pictures in (images, other))
    assert torch.equal(one.boxes, two.boxes)


@pytest.mark.parametrize("architecture", mainly(["detr"], SIZES))
def test_exported_folder_gives_the_same_boxes_in_a_pipeline(tmp_path, architecture):
    models, model = made(architecture)
    model = model.float().eval()
    about = {"size": SIZE, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3], "interpolation": "bilinear"}
    models.export(model, about, tmp_path)
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    width, height = (SIZE, SIZE) if models._family.padding == "stretched" else (SIZE, 48)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pipeline = transformers.pipeline("object-detection", model=str(tmp_path), device="cpu")
    expected = pipeline(Image.fromarray(pixels), threshold=0.0)

    image = torch.zeros(1, 3, SIZE, SIZE)
    mean, std = (torch.tensor(values)[:, None, None] for values in (about["mean"], about["std"]))
    image[0, :, :height, :width] = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    with torch.no_grad():
        outputs = models.forward(model, image, torch.tensor([[height, width]]), None)
    found = models.detections(model, outputs, size=(SIZE, SIZE), most=len(expected))
    assert len(expected) >= 6
    expected.sort(key=lambda box: -box["score"])
    for one, score, label, box in zip(
        expected, found.scores[0].tolist(), found.labels[0].tolist(), found.boxes[0].tolist(), strict=True
    ):
        assert one["score"] == pytest.approx(score, abs=1e-5)
        assert one["label"] == CLASSES[label]
        assert list(one["box"].values()) == pytest.approx(box, abs=1.001)  # the pipeline cuts to whole pixels


def test_pretrained_detector_gets_new_heads_for_other_classes(tmp_path):
    models, model = made("detr")
    model.float().save_pretrained(tmp_path)
    models = detector_cases.models_for(detector_cases.DetectionOptions(model=str(tmp_path)), None)
    with pytest.raises(LockstepError, match=r"task\.new_head=true"):
        models.classes(["cat", "dog"])
    options = detector_cases.DetectionOptions(model=str(tmp_path), new_head=True)
    models = detector_cases.models_for(options, None)
    assert models.classes(["cat", "dog"]) == ["cat", "dog"]
    changed, new = models.make(["cat", "dog"], size=SIZE, trained=False)
    assert new == ["class_labels_classifier.bias", "class_labels_classifier.weight"]
    assert changed.config.id2label == {0: "cat", 1: "dog"}
    name = "bbox_predictor.layers.0.weight"
    assert torch.equal(changed.state_dict()[name], model.state_dict()[name])
    targets = targets_of([1, 0])
    targets.labels[:] = 1
    outputs = models.forward(changed.eval(), torch.randn(2, 3, SIZE, SIZE), targets.shapes, None)
    assert models.losses(changed, outputs, targets)["class"] > 0
    models.save(["cat", "dog"], size=SIZE, folder=tmp_path / "kept")
    again = detector_cases.models_for(options, tmp_path / "kept")
    assert again.make(["cat", "dog"], size=SIZE, trained=True)[0].config.num_labels == 2


def test_stages_of_a_pretrained_resnet_train_and_its_stem_does_not(tmp_path):
    _, model = made("detr")
    assert all(value.requires_grad for value in model.parameters())  # a new backbone has nothing to keep
    model.float().save_pretrained(tmp_path)
    options = detector_cases.DetectionOptions(model=str(tmp_path))
    pretrained, _ = detector_cases.models_for(options, None).make(CLASSES, size=SIZE, trained=False)
    frozen = {name for name, value in pretrained.named_parameters() if not value.requires_grad}
    assert frozen
    assert all("embedder" in name or "stages.0" in name for name in frozen)


def test_errors_name_the_key_and_what_there_is():
    options = detector_cases.DetectionOptions.model_validate({"scratch": {"architecture": "det"}})
    models = detector_cases.models_for(options, None)
    with pytest.raises(LockstepError, match=r"(?s)no object detection model of type 'det'.*remedy: did you mean detr"):
        models.make(CLASSES, size=SIZE, trained=False)
    with pytest.raises(LockstepError, match="YOLOS of transformers has no auxiliary losses"):
        made("yolos", auxiliary_loss=True)
    with pytest.raises(LockstepError, match=r"task\.scratch\.sizes\.queries"):
        made("detr", queries=3)
    grey = detector_cases.options_of("rt_detr").model_copy(update={"channels": 1})  # its config counts no channels
    with pytest.raises(LockstepError, match=r"task\.channels.*takes images with 3 channels"):
        detector_cases.models_for(grey, None).make(CLASSES, size=SIZE, trained=False)


def test_backbone_of_timm_is_refused_where_timm_is_missing():
    with pytest.raises(LockstepError, match="is a timm model, but timm is not installed"):
        made("detr", backbone_config={"model_type": "timm_backbone", "backbone": "resnet18"})


def test_softmax_units_count_queries_with_and_without_a_box():
    models = models_of("detr", eos_coefficient=0.25)
    units = models.weights(targets_of([3, 0, 9]))
    assert float(units["box"]) == float(units["giou"]) == 12
    assert float(units["class"]) == (3 + 6) + 0.25 * (3 + 6 + 0)  # six queries: three of nine boxes have none


def test_batch_norm_suits_models_of_transformers_if_it_is_not_given():
    options = detector_cases.DetectionOptions.model_validate
    assert options({}).batch_norm == "group"
    assert options({"scratch": {"architecture": "rt_detr"}}).batch_norm == "batch"
    assert options({"model": "PekingU/rtdetr_r18vd"}).batch_norm == "frozen"
    assert options({"model": "PekingU/rtdetr_r18vd", "batch_norm": "sync"}).batch_norm == "sync"


def test_model_whose_layers_transformers_does_not_know_is_exported_with_a_warning(tmp_path):
    models, model = made("rt_detr")
    changed = exchange_batch_norm(model, "group")
    about = {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear"}
    (warning,) = models.export(changed, about, tmp_path)
    assert "transformers cannot load this model" in warning
    assert not (tmp_path / "config.json").exists()  # with it, transformers would make other layers without a word
