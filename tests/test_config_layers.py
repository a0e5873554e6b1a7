"""A config file that extends another."""

import pytest

from lockstep.core.config.sections import all_keys
from lockstep.core.errors import UsageError
from lockstep.recipes import config_file
from lockstep.recipes.config_layers import RENAMED, read_target


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
        ("extends: [a, b]\n", "is no file"),
    ],
)
def test_what_cannot_be_extended_is_an_error(write, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        config_file.load(write("mine.yaml", text))
    assert "mine.yaml" in str(caught.value)


@pytest.fixture
def renamed(monkeypatch):
    names = {"train.length": ("train.steps", "0.3"), "random_seed": ("seed", "0.3"), "clip": ("optim.clip_norm", "0.4")}
    monkeypatch.setattr("lockstep.recipes.config_layers.RENAMED", names)


def test_a_key_that_was_renamed_is_taken_with_a_warning(renamed, write):
    mine = write("mine.yaml", "task: {kind: toy}\ntrain: {length: 7}\nrandom_seed: 3\n")
    with pytest.warns(FutureWarning) as warned:
        config = config_file.load(mine, ["clip=0.5"])
    assert (config.train.steps, config.seed, config.optim.clip_norm) == (7, 3, 0.5)
    assert [str(one.message) for one in warned] == [
        f"{mine}: train.length is called train.steps now, and lockstep 0.3 will refuse the old name",
        f"{mine}: random_seed is called seed now, and lockstep 0.3 will refuse the old name",
        f"{mine}: clip is called optim.clip_norm now, and lockstep 0.4 will refuse the old name",
    ]


def test_a_key_by_both_of_its_names_is_an_error(renamed):
    values = {"task": {"kind": "toy"}, "seed": 1, "random_seed": 2}
    with pytest.raises(UsageError, match="random_seed and seed are the same key"):
        config_file.parse(values)


def test_no_key_of_today_is_an_old_name():
    assert not {key for key, _ in all_keys()} & RENAMED.keys()
    assert {new for new, _ in RENAMED.values()} <= {key for key, _ in all_keys()}
