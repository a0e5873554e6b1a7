"""A config file that extends another."""

import pytest

from lockstep.configs import config_file
from lockstep.configs.config_layers import read_target
from lockstep.core.errors import UsageError


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def test_a_file_changes_single_keys_of_a_recipe(write):
    mine = write("mine.yaml", "extends: digits\noptim: {lr: 0.5}\ntrain: {steps: 7}\n")
    config, recipe = config_file.load(mine), config_file.load("digits")
    assert (config.name, config.optim.lr, config.train.steps, config.train.epochs) == ("mine", 0.5, 7, None)
    assert config.optim.clip_norm == recipe.optim.clip_norm
    assert (config.task, config.batch) == (recipe.task, recipe.batch)


def test_files_extend_files_beside_them_over_several_levels(write):
    write("base/base.yaml", "extends: toy\nseed: 1\noptim: {lr: 0.1, weight_decay: 0.2}\n")
    write("middle.yaml", "extends: base/base.yaml\noptim: {lr: 0.2}\n")
    config = config_file.load(write("top.yaml", "extends: middle.yaml\nseed: 3\n"), ["batch.global=8"])
    assert (config.seed, config.optim.lr, config.optim.weight_decay, config.batch.global_) == (3, 0.2, 0.2, 8)
    sources = read_target(str(write("top.yaml", "extends: middle.yaml\nseed: 3\n"))).sources
    assert sources["optim.lr"].endswith("middle.yaml")
    assert sources["optim.weight_decay"].endswith("base.yaml")


def test_an_error_names_the_file_in_which_the_key_is(write):
    base = write("base.yaml", "extends: toy\noptim: {lr: fast}\n")
    with pytest.raises(UsageError, match=rf"{base}: optim\.lr"):
        config_file.load(write("mine.yaml", "extends: base.yaml\nseed: 2\n"))


def test_another_kind_of_task_gets_none_of_the_options(write):
    mine = write("mine.yaml", "extends: digits\ntask: {kind: toy}\ndata: {train: null, eval: null}\n")
    assert config_file.load(mine).task["kind"] == "toy"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: mine.yaml\n", "a circle"),
        ("extends: other.yaml\n", "no such file"),
        ("extends: digist\n", "did you mean digits"),
        ("extends: [a, b]\n", "is not a file"),
    ],
)
def test_what_cannot_be_extended_is_an_error(write, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        config_file.load(write("mine.yaml", text))
    assert "mine.yaml" in str(caught.value)
