"""What a task's source is, and where it differs: in what it means, not in how it is written."""

import importlib
import importlib.util
import linecache
import subprocess
import sys
import textwrap
import types

import pytest

from lockstep.configs.registry import build_task
from lockstep.trainer import source_code
from tests import own_tasks


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files below a folder, whose modules are forgotten at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def write(**texts):
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


# ---- files

TASK = """
import torch, losses
from models.net import Net
from lockstep import Task

class Mine(Task):
    def model(self):
        import lazily.later
        return Net()
    def train_data(self):
        import importlib
        return importlib.import_module("by_name")
    def loss(self, model, batch):
        return losses.squared(batch)
"""


def test_files_are_those_that_the_task_imports_from_its_folder(write):
    folder = write(
        task=TASK,
        losses="from helpers import x",
        helpers="x = 1",
        by_name="",
        unrelated="",
        torch="",
        lazily__later="",
        models__unrelated="",
    )
    (folder / "models" / "net.py").write_text("from . import block\nimport losses")
    (folder / "models" / "block.py").write_text("")
    (folder / "models" / "__init__.py").write_text("import os")
    found = source_code.of_file(folder / "task.py")
    expected = {
        "task.py",
        "losses.py",
        "helpers.py",
        "by_name.py",
        "lazily/later.py",
        "models/__init__.py",
        "models/net.py",
        "models/block.py",
    }
    assert found.keys() - {"torch.py"} == expected
    assert found["losses.py"] == "from helpers import x"


def test_files_of_a_package_are_named_from_its_root(write):
    folder = write(
        lab__task="from .util import x\nfrom ..lab.deep import y\nimport sibling",
        lab__util="",
        lab__sibling="",
        lab__deep__y="",
        lab__other="",
    )
    (folder / "lab" / "__init__.py").write_text("from . import loaded_by_package")
    (folder / "lab" / "loaded_by_package.py").write_text("")
    (folder / "lab" / "deep" / "__init__.py").write_text("")
    names = {"__init__", "task", "util", "sibling", "loaded_by_package", "deep/__init__", "deep/y"}
    assert source_code.of_file(folder / "lab" / "task.py").keys() == {f"lab/{name}.py" for name in names}


def test_module_that_was_imported_under_a_computed_name_counts(write):
    folder = write(task="import importlib\nx = importlib.import_module('zoo.' + 'bear')", zoo__bear="", zoo__wolf="")
    sys.path.insert(0, str(folder))
    assert source_code.of_file(folder / "task.py").keys() == {"task.py"}
    importlib.import_module("zoo.bear")
    assert source_code.of_file(folder / "task.py").keys() == {"task.py", "zoo/bear.py"}


@pytest.mark.parametrize("text", ["def broken(:", "\0", "import task", "import .", "x = '\\d'"])
def test_odd_files_are_no_error(write, text):
    folder = write(task="import odd", odd=text)
    assert source_code.of_file(folder / "task.py") == {"task.py": "import odd", "odd.py": text}
    assert source_code.digest({"odd.py": text})


def test_task_of_a_file_is_told_from_another_task(write):
    folder = write(mine=TASK.replace("from models.net import Net\n", ""), losses="")
    kind = f"{folder}/mine.py:Mine"
    task = build_task({"kind": kind}, None, None)
    assert source_code.of_task(task, kind).keys() == {"mine.py", "losses.py"}
    assert source_code.of_task(task, kind, {"losses.py": "old", "gone.py": ""}) == {"losses.py": ""}
    assert source_code.of_task(task, f"{folder}/mine.py:Other").keys() == {"lockstep_user_mine.Mine"}
    assert source_code.of_task(build_task({"kind": "toy"}, None, None), "toy") == {}


# ---- classes


def test_class_counts_with_its_bases_and_what_they_name():
    found = source_code.of_task(own_tasks.Deep())
    assert found.keys() == {
        f"tests.own_tasks.{name}" for name in ("Deep", "Masked", "masked_data", "DeepModel", "Block")
    }
    assert found["tests.own_tasks.Block"].startswith("class Block(nn.Module):\n")


def test_local_class_counts():
    class Local(own_tasks.Plain):
        """With text that is not indented:
        here."""

        def loss(self, model, batch):
            return super().loss(model, batch) * 2

    found = source_code.of_task(Local())
    name = f"{__name__}.test_local_class_counts.<locals>.Local"
    assert found.keys() - {f"tests.own_tasks.{name}" for name in ("Plain", "Masked", "masked_data")} == {name}
    changed = found | {name: found[name].replace("* 2", "* 3")}
    assert source_code.difference(found, changed).startswith(f"{name} differs in 1 place, first in Local.loss: now ")
    assert source_code.difference(found, found | {name: found[name].replace("here.", "there.")}) is None


@pytest.fixture
def space(monkeypatch):
    """The names of an empty module `__main__`, as that of a notebook."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    return vars(sys.modules["__main__"])


def typed(space, code, number):
    """A class as a notebook has it: its text is known to Python, and in no file."""
    name = f"<ipython-input-{number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), space)
    return space.pop("Typed")


def test_class_of_a_notebook_counts_by_its_methods(space):
    code = "class Typed:\n    size = 3\n    def loss(self):\n        return {}\n"
    code += "    @staticmethod\n    def help(): return 1\n"
    one, same, other = (
        source_code.of_class(typed(space, code.format(value), number)) for number, value in enumerate((1, 1, 2))
    )
    assert one == same
    assert (
        source_code.difference(one, other)
        == '__main__.Typed differs in 1 place, first in loss: now "return 2", before "return 1"'
    )


def test_class_without_source_has_none(space):
    exec("class Typed:\n    def loss(self): return 1\n", space)
    assert source_code.of_task(space["Typed"]()) == {}
    assert source_code.of_class(type("Made", (), {})) == {}


# ---- what is a difference

CODE = '''
"""What it is."""
import os

WIDTH = 3  # a constant

class Mine(Base):
    """A task."""
    size: int = 3

    def loss(self, model, batch):
        """The sum."""
        # of squares
        return (model(batch[0]) -
                batch[1]).square().sum()

    @property
    def two(self): return 2

def helper(x):
    return x

if __name__ == "__main__":
    print("nothing of the task")
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a constant", ""),
        ("# of squares", "# of the squares\n\n\n"),
        ('"""What it is."""', ""),
        ('"""A task."""', '"""One task."""'),
        ('        """The sum."""\n', ""),
        ("(model(batch[0]) -\n                batch[1])", "(model(batch[0]) - batch[1])"),
        ("WIDTH = 3", "WIDTH=3"),
        ("nothing of", "something of"),
        ("return x\n", "return (x)\n\n"),
    ],
)
def test_layout_comments_and_docstrings_are_no_difference(old, new):
    assert old in CODE
    changed = CODE.replace(old, new)
    assert source_code.difference({"mine.py": CODE}, {"mine.py": changed}) is None
    assert source_code.digest({"mine.py": CODE}) == source_code.digest({"mine.py": changed})


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "square()",
            "abs()",
            '1 place, first in Mine.loss (from line 11): now "return (model(batch[0]) - batch[1]).abs().sum()", '
            'before "return (model(batch[0]) - b',
        ),
        ("WIDTH = 3", "WIDTH = 4", '1 place, first outside of functions: now "WIDTH = 4", before "WIDTH = 3"'),
        (
            "size: int = 3",
            "size: int = 4",
            '1 place, first in Mine (from line 7): now "size: int = 4", before "size: int = 3"',
        ),
        (
            "(Base)",
            "(Other)",
            '1 place, first in Mine (from line 7): now "class Mine(Other):", before "class Mine(Base):"',
        ),
        ("return 2", "return 3", '1 place, first in Mine.two (from line 18): now "return 3", before "return 2"'),
        ("@property", "@cached", '1 place, first in Mine.two (from line 18): now "@cached", before "@property"'),
        (
            "def helper(x):",
            "def helper(x, y=1):",
            '1 place, first in helper (from line 20): now "def helper(x, y=1):", before "def helper(x):"',
        ),
        ("def helper(x):\n    return x\n", "", '1 place, first in helper: now nothing, before "def helper(x):"'),
        (
            "    return x\n",
            "    return x\n\ndef more():\n    pass\n",
            '1 place, first in more (from line 23): now "def more():", before nothing',
        ),
        ("2\n", "3\n", '2 places, first in Mine.two (from line 18): now "return 3", before "return 2"'),
        (CODE, "def broken(:", '5 places, first outside of functions: now "def broken(:", before "import os"'),
    ],
)
def test_difference_names_the_place_and_what_it_says(old, new, text):
    code = CODE.replace("return x\n", "return x + 2\n") if text.startswith("2") else CODE
    changed = code.replace(old, new)
    assert source_code.difference({"mine.py": code}, {"mine.py": changed}).startswith(f"mine.py differs in {text}")
    assert source_code.digest({"mine.py": code}) != source_code.digest({"mine.py": changed})


def test_parts_that_come_and_go_are_a_difference_and_many_are_one_line():
    old = {f"{name}.py": "x = 1" for name in "abcdef"}
    assert source_code.difference(old, old) is None
    assert source_code.difference(old, {**old, "g.py": ""}) == "g.py is new"
    assert source_code.difference(old, {"a.py": "x = 1"}) == "b.py is gone; c.py is gone; d.py is gone; and 2 more"
    assert "\n" not in source_code.difference(old, dict.fromkeys(old, "x = 2"))


def test_what_is_written_is_read_back_and_replaced(tmp_path):
    folder = tmp_path / "source"
    parts = {"task.py": "x", "lab/net.py": "caf\u00e9", "tests.own.<locals>.Mine": "y"}
    source_code.write(folder, parts)
    assert source_code.read(folder) == parts
    source_code.write(folder, {"task.py": "z"})
    assert source_code.read(folder) == {"task.py": "z"}
    source_code.write(folder, {})
    assert source_code.read(folder) == {}
    assert list(tmp_path.iterdir()) == []


# ---- git


def git(folder, *arguments):
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_commit_is_that_of_the_folder_and_says_whether_files_differ(tmp_path, monkeypatch):
    assert source_code.commit(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "task.py").write_text("x = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    name = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log").write_text("untracked")
    assert source_code.commit(tmp_path / "lab") == {"commit": name, "dirty": False}
    (tmp_path / "lab" / "task.py").write_text("x = 2")
    assert source_code.commit(tmp_path / "lab") == {"commit": name, "dirty": True}
    assert source_code.commit(tmp_path / "nowhere") is None
    monkeypatch.setenv("PATH", "")
    assert source_code.commit(tmp_path / "lab") is None
