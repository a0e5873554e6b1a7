"""The size of images as a function of the epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import LockstepError
from lockstep.configs import config_file
from lockstep_recipes.tasks.vision.image_options import ImageOptions, size_at


def options(**keys):
    return ImageOptions.model_validate(keys)


def test_step_function():
    sizes = options(image_size={0: 128, 20: 160, 40: 192})
    assert [sizes.size_at(epoch, 0) for epoch in (0, 19, 20, 39, 40, 1000)] == [128, 128, 160, 160, 192, 192]
    assert sizes.all_sizes(0) == [128, 160, 192]
    assert sizes.size_for_evaluation(0) == 192


def test_linear_between_is_rounded_to_a_multiple_half_upwards():
    sizes = options(image_size={0: 160, 11: 160, 13: 192}, image_size_between="linear", eval_size=256)
    assert [sizes.size_at(epoch, 0) for epoch in (0, 11, 12, 13, 15)] == [160, 160, 192, 192, 192]  # 176 is half way
    assert sizes.all_sizes(0) == [160, 192, 256]
    finer = options(image_size={0: 100, 10: 200}, image_size_between="linear", image_size_multiple=8)
    assert [finer.size_at(epoch, 0) for epoch in range(11)] == [100, 112, 120, 128, 144, 152, 160, 168, 184, 192, 200]


def test_without_a_size_the_model_says_it():
    assert (options().size_at(3, 224), options().all_sizes(224), options(eval_size=256).all_sizes(224)) == (
        224,
        [224],
        [224, 256],
    )
    assert options(image_size=64).all_sizes(224) == [64]


@given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 400), max_size=5),
    st.integers(1, 400),
    st.integers(1, 64),
    st.integers(0, 80),
)
def test_sizes_between_lie_between_and_are_multiples(later, first, multiple, epoch):
    sizes = dict(sorted({0: first, **later}.items()))
    found = size_at(sizes, epoch, multiple=multiple)
    before = max(start for start in sizes if start <= epoch)
    after = min((start for start in sizes if start > epoch), default=before)
    low, high = sorted((sizes[before], sizes[after]))
    assert low <= found <= high
    assert found % multiple == 0 or found in (low, high)
    assert size_at(sizes, before, multiple=multiple) == sizes[before]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("task.image_size={20: 160}", "does not give a size for epoch 0"),
        ("task.image_size={0: 160, -1: 10}", "does not give a size for epoch 0"),
        ("task.image_size={0: 0}", "greater than 0"),
        ("task.image_size={0: 128, 0.5: 140, 3: 160}", "neither epochs nor fractions"),
        ("task.image_size={0: 128, 1.5: 160}", "neither epochs nor fractions"),
        ("task.image_size={0: 128, 0.5: 160} task.eval_size=160", "write epochs, or set train.epochs"),
        ("task.eval_size=256 task.eval_resize=224", "eval_resize >= 256"),
        ("task.mean=[0.5]", "mean has 1 number, but channels is 3"),
        ("task.augment.crops=shift", "task.augment.crop?"),
    ],
)
def test_wrong_options_are_errors_of_the_config(keys, message):
    overrides = keys.split(" task.")
    overrides = [overrides[0], *(f"task.{rest}" for rest in overrides[1:])]
    with pytest.raises(LockstepError) as caught:
        config_file.load("image_folder", ["data.train=x", *overrides])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("epochs", "sizes"),
    [(16, {0: 160, 12: 192}), (32, {0: 160, 24: 192}), (1, {0: 192}), (2, {0: 160, 1: 192})],
)
def test_shares_of_the_training_follow_the_number_of_epochs_and_the_config_keeps_epochs(epochs, sizes):
    config = config_file.load("imagenet", ["data.train=x", f"train.epochs={epochs}"])
    assert config.task["image_size"] == sizes
    assert config_file.parse(config.model_dump(by_alias=True)).task == config.task


def test_shares_need_epochs():
    with pytest.raises(ValueError, match="for_epochs"):
        options(image_size={0: 12, 0.5: 16}).size_at(0, 0)
    assert options(image_size={0: 12, 0.5: 16}).for_epochs(4).size_at(2, 0) == 16


def test_sizes_by_epoch_survive_the_kept_config(tmp_path):
    config = config_file.load("image_folder", ["data.train=x", "task.image_size={0: 16, 3: 24}"])
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(config))
    assert config_file.read_run(tmp_path) == config
    assert config.task["image_size"] == {0: 16, 3: 24}


PICTURES = {"kind": "classification", "scratch": {"architecture": "convnet"}}


@pytest.mark.parametrize("sizes", [{"image_size": {0: 16, 2: 24}}, {"image_size": {0: 16, 9: 24}}])
@pytest.mark.parametrize("between", ["step", "linear"])
def test_a_size_for_evaluation_that_training_never_reaches_is_an_error(sizes, between):
    task = PICTURES | sizes | {"image_size_between": between}
    last = max(sizes["image_size"])
    with pytest.raises(
        LockstepError, match=rf"24 pixels from epoch {last} \(counted from 0\), but the run ends after 2 epochs"
    ):
        config_file.parse({"task": task, "train": {"epochs": 2}})
    with pytest.raises(LockstepError, match=r"command line: task\.image_size: .* set task\.eval_size"):
        config_file.parse({"task": PICTURES}, overrides=["task.image_size={0: 16, 1: 24}"])  # one epoch
    config_file.parse({"task": task | {"eval_size": 16}, "train": {"epochs": 2}})
    config_file.parse({"task": task, "train": {"epochs": last + 1}})
    config_file.parse({"task": task, "train": {"steps": 2}})  # the number of epochs depends on the data
    config_file.parse({"task": task, "train": {"epochs": 2}}, needs_task=False)  # a run that has been trained


@pytest.mark.parametrize("size", [{"image_size": 32}, {"image_size": {0: 16, 1: 32}}, {"eval_size": 32}])
def test_a_cut_larger_than_the_resized_picture_is_an_error_of_the_config(size):
    task = PICTURES | size
    with pytest.raises(LockstepError, match=r"eval_resize \(24\) is below the size of evaluation images \(32\)"):
        config_file.parse({"task": task | {"eval_resize": 24}, "train": {"epochs": 2}})
    config_file.parse({"task": task | {"eval_resize": 32}, "train": {"epochs": 2}})
