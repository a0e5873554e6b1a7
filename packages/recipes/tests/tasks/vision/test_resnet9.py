"""The networks of `image_folder`, and what depends on the size of its images."""

import json

import pytest
import torch
from PIL import Image

from lockstep import LockstepError
from lockstep.configs import config_file
from lockstep_recipes.tasks.vision.classification.models import median_side, size_for
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.resnet9 import ConvNet4, ResNet9, StandardizedConv2d
from lockstep_recipes.tasks.vision.readers.image_records import read_image_records
from tests.image_cases import make_task

RESNET9 = {"scratch": {"architecture": "resnet9"}}


def folder_of(path, sides):
    """A folder with two classes, whose images have these shorter sides."""
    for number, side in enumerate(sides):
        file = path / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2 * side, side)).save(file)
    return str(path)


@pytest.mark.parametrize("network", [ConvNet4, ResNet9])
def test_a_picture_has_the_same_logits_alone_and_in_a_batch(network):
    torch.manual_seed(0)
    model = network(3, 5).double()
    images = torch.randn(6, 3, 24, 16, dtype=torch.float64)
    whole = model.train()(images)
    assert whole.shape == (6, 5)
    assert torch.allclose(torch.cat([model(part) for part in images.split(1)]), whole, rtol=0, atol=1e-12)
    assert not list(model.buffers())


@pytest.mark.parametrize("network", [ConvNet4, ResNet9])
def test_group_norm_gives_the_same_gradients_with_channels_last(network):
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = network(3, 5).double().to(memory_format=form)
        assert any(isinstance(module, torch.nn.GroupNorm) for module in model.modules())
        images = torch.randn(6, 3, 24, 16, dtype=torch.float64).to(memory_format=form)
        logits = model(images)
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_weights_are_standardized_so_neither_their_scale_nor_their_mean_matters():
    convolution = StandardizedConv2d(3, 4).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = convolution(images)
    with torch.no_grad():
        convolution.weight.mul_(7).add_(3)
    assert torch.allclose(convolution(images), before, atol=1e-2)
    assert convolution(images).shape == (2, 4, 8, 8)


@pytest.mark.cases("sides3")
@pytest.mark.parametrize(
    ("sides", "expected"),
    [([500, 300, 400], 48), ([28, 28, 28], 32), ([35, 200, 39], 40), ([8], 32), ([500] * 9 + [32] * 400, 32)],
)
def test_the_data_say_the_size_of_pictures(tmp_path, sides, expected):
    records = read_image_records(folder_of(tmp_path, sides), "train", ClassificationOptions())
    assert size_for(median_side(records)) == expected


def test_the_run_keeps_the_size_that_the_data_say(tmp_path):
    folder = folder_of(tmp_path / "pictures", [40] * 4)
    task = make_task(RESNET9, folder, double=False)
    task.setup(tmp_path / "run", trained=False)
    for file in (tmp_path / "pictures").rglob("*.png"):
        Image.new("RGB", (300, 300)).save(file)
    assert task.about.size == 40
    assert make_task(RESNET9 | {"image_size": 24}, folder, double=False).options.size_at(0, 48) == 24
    assert make_task({}, folder, double=False).about.size == 32  # the convnet's


def test_a_picture_that_cannot_be_decoded_is_no_fault_of_the_size(tmp_path):
    folder = folder_of(tmp_path, [40] * 4)
    (tmp_path / "a" / "0.png").write_bytes(b"nothing")
    assert median_side(read_image_records(folder, "train", ClassificationOptions())) == 40


AUTO = {"augment": {"crop": "auto", "scale": [0.35, 1.0], "shift": 3}, "cutmix_alpha": "auto"}


def changes_of(task):
    """The crop, and whether cutmix is drawn."""
    item = task.prepare(task.train_data()[0], 0, training=True)
    assert ("partner_labels" in item) == bool(task.decided.cutmix_alpha)
    augment = task.decided.augment
    assert (augment.scale, augment.shift) == ((0.35, 1.0), 3)  # the other keys are as given
    return augment.crop, task.decided.cutmix_alpha


@pytest.mark.parametrize(
    ("sides", "options", "expected"),
    [
        ([64] * 4, {}, ("shift", 0)),
        ([65] * 4, {}, ("random_resized", 1)),
        ([32, 32, 32, 500], {}, ("shift", 0)),
        ([300, 300, 300, 32], {"image_size": 16}, ("random_resized", 1)),  # their own size counts
        ([32] * 4, {"cutmix_alpha": 0.5}, ("shift", 0.5)),
        ([32] * 4, {"augment": AUTO["augment"] | {"crop": "fit"}}, ("fit", 0)),
        ([300] * 4, {"augment": AUTO["augment"] | {"crop": "shift"}, "cutmix_alpha": 0}, ("shift", 0)),
    ],
)
def test_small_pictures_are_shifted_and_photographs_cropped_and_mixed(tmp_path, sides, options, expected):
    task = make_task(RESNET9 | AUTO | options, folder_of(tmp_path, sides), double=False)
    assert changes_of(task) == expected
    lines = [line for line in task.presenter(task).log_header() if "or less are small" in line]
    asked = "auto" in (task.options.augment.crop, task.options.cutmix_alpha)
    said = f": task.scratch.architecture=resnet9, task.augment.crop={expected[0]}, task.cutmix_alpha={expected[1]:g}"
    assert [line.endswith(said) for line in lines] == [True] * asked


@pytest.mark.cases("65")
@pytest.mark.parametrize(("side", "kind"), [(64, ConvNet4), (65, ResNet9)])
def test_the_pictures_decide_the_network(tmp_path, side, kind):
    folder = folder_of(tmp_path / "pictures", [side] * 4)
    auto = {"scratch": {"architecture": "auto"}}
    task = make_task(auto, folder, double=False)
    task.setup(tmp_path / "run", trained=False)
    assert type(task.model()) is kind
    assert task.about.size == 48
    wider = make_task({"scratch": {"architecture": "auto", "sizes": {"width": 48}}}, folder, double=False).model()
    assert wider.layers[0][0].out_channels == 48
    small = make_task(auto | {"image_size": 9}, folder, double=False)  # pooling leaves a pixel
    assert small.model()(torch.zeros(1, 3, 9, 9)).shape == (1, 2)


def test_the_run_keeps_what_the_pictures_decided(tmp_path):
    folder = folder_of(tmp_path / "pictures", [40] * 4)
    for start in range(2):
        task = make_task(RESNET9 | AUTO, folder, double=False)
        task.setup(tmp_path / "run", trained=bool(start))
        assert task.decided.augment.crop == "shift"
        for file in (tmp_path / "pictures").rglob("*.png"):
            Image.new("RGB", (300, 300)).save(file)
    # A run from before this rule has kept no such size, and needs none.
    kept = tmp_path / "run" / "classification.json"
    kept.write_text(json.dumps({key: value for key, value in json.loads(kept.read_text()).items() if key != "side"}))
    old = make_task(RESNET9 | {"cutmix_alpha": 1.0}, folder, double=False)
    old.setup(tmp_path / "run", trained=True)
    assert (old.decided.augment.crop, old.decided.cutmix_alpha) == ("random_resized", 1.0)


def test_the_recipe_follows_the_pictures_and_a_key_on_the_command_line_wins():
    given = ["data.train=x", "task.augment.crop=fit", "task.cutmix_alpha=0.3"]
    given.append("task.scratch={architecture: resnet9}")
    asked, told = (config_file.load("image_folder", keys).task for keys in (given[:1], given))
    assert [config["scratch"]["architecture"] for config in (asked, told)] == ["auto", "resnet9"]
    assert (asked["augment"]["crop"], asked["cutmix_alpha"]) == ("auto", "auto")
    assert (told["augment"]["crop"], told["cutmix_alpha"]) == ("fit", 0.3)


@pytest.mark.parametrize(
    ("sizes", "message"), [({"width": 24}, "use a multiple of 16, at least 16"), ({"depth": 3}, "resnet9 takes: width")]
)
def test_wrong_sizes_are_errors(tmp_path, sizes, message):
    task = make_task({"scratch": {"architecture": "resnet9", "sizes": sizes}}, folder_of(tmp_path, [32] * 4))
    with pytest.raises(LockstepError, match=message):
        task.model()


def test_few_pictures_make_as_many_updates_as_the_recipe_says():
    train = config_file.load("image_folder", ["data.train=x"]).train
    assert train.min_steps >= 300
    assert train.known_epochs is None
    epochs = config_file.load("image_folder", ["data.train=x", "train.steps=7"]).train
    assert (epochs.steps, epochs.min_steps, epochs.epochs) == (7, None, None)
