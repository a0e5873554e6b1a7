"""Tasks and recipes of other distributions, found by entry points."""

import sys

import pytest
import yaml

from lockstep import Task
from lockstep.configs import config_file, registry
from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import UsageError

OPTIONS = """
import sys
from typing import ClassVar
from pydantic import PositiveInt
from lockstep.configs.task_options import TaskOptions

class LineOptions(TaskOptions):
    task: ClassVar[str] = "line_task.task:Line"
    width: PositiveInt = 3
    def suggestions(self):
        return {"optim": {"lr": 0.25}}

class NoOptions:
    pass
"""
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Task

class Line(Task):
    def __init__(self, options, train=None):
        self.options, self.train = options, train
    def model(self):
        return nn.Linear(self.options.width, 1)
    def train_data(self):
        return TensorDataset(torch.randn(64, self.options.width), torch.zeros(64, 1))
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that makes a distribution with these entry points, as an installer would."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def install(name, entry_points):
        folder = site / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (folder / "entry_points.txt").write_text(entry_points)
        return site

    yield install
    for module in [name for name in sys.modules if name.partition(".")[0] in ("line_task", "line_recipes")]:
        del sys.modules[module]


@pytest.fixture
def line(install):
    site = install(
        "line-task", "[lockstep.tasks]\nline = line_task.options:LineOptions\n[lockstep.recipes]\nx = line_recipes\n"
    )
    (site / "line_task").mkdir()
    (site / "line_task" / "__init__.py").write_text("")
    (site / "line_task" / "options.py").write_text(OPTIONS)
    (site / "line_task" / "task.py").write_text(TASK)
    (site / "line_recipes").mkdir()
    (site / "line_recipes" / "__init__.py").write_text("")
    (site / "line_recipes" / "short_line.yaml").write_text("# Fit a line.\ntask: {kind: line, width: 2}\n")
    return site


def test_a_task_of_another_distribution_is_configured_and_made(line):
    config = config_file.parse({"task": {"kind": "line"}})
    assert config.task == {"kind": "line", "width": 3}
    assert config.optim.lr == 0.25
    task = registry.build_task(config.task | {"width": 5}, "here", None)
    assert isinstance(task, Task)
    assert (task.options.width, task.train) == (5, "here")


def test_options_are_read_without_the_task(line):
    config_file.parse({"task": {"kind": "line"}})
    assert "line_task.task" not in sys.modules


def test_wrong_options_are_named_like_those_of_shipped_tasks(line):
    with pytest.raises(UsageError) as caught:
        config_file.parse({"task": {"kind": "line", "widht": 2}}, "file.yaml")
    assert "file.yaml: task.widht: unknown key; did you mean task.width? known here: width" in str(caught.value)
    with pytest.raises(UsageError, match="'lin' is not a kind; did you mean line"):
        config_file.parse({"task": {"kind": "lin"}})
    with pytest.raises(UsageError, match=r"data\.eval: Line has no use for 'there'\n.*Line takes: train"):
        registry.build_task({"kind": "line"}, "here", "there")
    with pytest.raises(UsageError, match=r"data\.cache: Line has no use for a cache of decoded images"):
        registry.build_task({"kind": "line"}, "here", None, CacheOptions(10**9))


def test_a_task_with_a_parameter_for_the_cache_gets_it(tmp_path):
    text = "from lockstep_recipes.tasks.toy.task import Toy\n\nclass Mine(Toy.__base__):\n"
    text += "    def __init__(self, train, cache=None):\n        self.cache = cache\n"
    text += "    model = train_data = loss = None\n"
    (tmp_path / "mine.py").write_text(text)
    section = {"kind": f"{tmp_path}/mine.py:Mine"}
    assert registry.build_task(section, "here", None, CacheOptions(5, 256)).cache == CacheOptions(5, 256)
    assert registry.build_task(section, "here", None).cache is None


def test_recipes_of_another_distribution_are_listed_and_read(line):
    recipes = config_file.recipes()
    assert recipes["short_line"] == "Fit a line."
    assert list(recipes)[-1] == "short_line"  # shipped recipes come first
    config = config_file.load("short_line", ["task.width=4"])
    assert config.task == {"kind": "line", "width": 4}
    assert config.name == "short_line"
    with pytest.raises(UsageError, match=r"did you mean short_line\?"):
        config_file.load("short_lin")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no_such_module:Options", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("line_task.options:Missing", "AttributeError"),
        ("line_task.options:NoOptions", "is not a subclass of lockstep.TaskOptions"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_an_error_that_names_its_distribution(line, install, entry, words):
    install("broken-task", f"[lockstep.tasks]\nbroken = {entry}\n")
    with pytest.raises(UsageError) as caught:
        config_file.parse({"task": {"kind": "broken"}})
    assert str(caught.value).startswith(f"distribution broken-task 1.5: {entry}")
    assert words in str(caught.value)
    config_file.parse({"task": {"kind": "line"}})  # other distributions are not disturbed
    config_file.parse({"task": {"kind": "toy"}})


def test_recipes_that_cannot_be_loaded_are_an_error_that_names_their_distribution(install):
    install("broken-recipes", "[lockstep.recipes]\nx = no_such_package\n")
    with pytest.raises(UsageError, match=r"distribution broken-recipes 1\.5: no_such_package cannot be loaded"):
        config_file.recipes()
    assert config_file.load("toy").name == "toy"  # shipped recipes are not disturbed


def test_a_name_that_two_distributions_declare_is_an_error_that_names_both(line, install):
    install("other-line", "[lockstep.tasks]\nline = other:Options\n")
    with pytest.raises(UsageError, match="'line' is declared twice") as caught:
        config_file.parse({"task": {"kind": "line"}})
    assert "distribution line-task 1.5" in caught.value.where
    assert "distribution other-line 1.5" in caught.value.where


def test_shipped_names_cannot_be_replaced(line, install):
    install("other-toy", "[lockstep.tasks]\ntoy = line_task.options:LineOptions\n")
    assert "hidden" in config_file.parse({"task": {"kind": "toy"}}).task
    shipped = ["classification", "detection", "lm", "segmentation", "text", "toy", "volume_risk"]
    assert registry.kinds() == [*shipped, "line"]


def test_every_shipped_recipe_is_a_valid_config():
    for name, file in registry.recipes().items():
        assert yaml.safe_load(file.read_text())["task"]["kind"] in registry.kinds(), name
