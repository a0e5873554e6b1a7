"""Writers are found by name: built-in ones, those of installed packages, and those in a file."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lockstep import Trainer
from lockstep.core.errors import UsageError
from lockstep.core.writer import Writer
from lockstep.parts.factory import open_writers
from lockstep.parts.writer_kinds import files_of_writers, find_writer
from tests import own_tasks, runs
from tests.parts.cases import run_info

SOURCE = """
from lockstep.core.writer import RunInfo, Writer


class Notes(Writer):
    files = ("notes.txt",)

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.file = (run.folder / "notes.txt").open("a")
        self.file.write(f"{run.name} on {run.world_size} {run.device} from {run.first_step} to {run.last_step}\\n")

    def record(self, entry):
        self.file.write(f"{entry['step']} {entry['train/loss'] > 0}\\n")

    def close(self):
        self.file.close()


class NoWriter:
    pass
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package `made-up` with two entry points."""
    site = tmp_path / "site"
    (site / "made_up-1.dist-info").mkdir(parents=True)
    (site / "made_up_writers.py").write_text(SOURCE)
    (site / "made_up-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    entries = (
        "[lockstep.writers]\nnotes = made_up_writers:Notes\nnone = made_up_writers:NoWriter\ngone = made_up_gone:Gone\n"
    )
    (site / "made_up-1.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("made_up_writers", None)


@pytest.mark.parametrize("name", ["text_log", "json_lines", "tensorboard", "console"])
def test_built_in_writers_are_found_by_their_module(name):
    assert issubclass(find_writer(name), Writer)
    assert find_writer(name).__module__ == f"lockstep.parts.writers.{name}"


def test_files_are_those_of_all_built_in_writers_and_of_the_named(file):
    built_in = {"train.log", "metrics.jsonl", "tensorboard", "trackers"}
    assert files_of_writers([]) == built_in
    assert files_of_writers(["text_log", "mine.py:Notes"]) == built_in | {"notes.txt"}


def test_writers_open_in_order_each_once_and_the_console_last(tmp_path):
    writers = open_writers(run_info(tmp_path), ["json_lines", "text_log", "json_lines"], quiet=True)
    assert [writer.name for writer in writers] == ["metrics.jsonl", "train.log"]
    writers += open_writers(run_info(tmp_path), [], quiet=False)
    assert writers[-1].name == "the console"
    for writer in writers:
        writer.close()


def test_writer_in_a_file_receives_the_log_and_fresh_deletes_what_it_wrote(file, tmp_path):
    settings = runs.config(name="mine", train={"steps": 10}, log={"writers": ["mine.py:Notes"]})
    for fresh in (False, True):
        Trainer(settings, run_dir=tmp_path / "run", quiet=True, fresh=fresh).fit(own_tasks.Plain())
        assert (tmp_path / "run" / "notes.txt").read_text() == "mine on 1 cpu from 0 to 10\n5 True\n10 True\n"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_writer_of_the_documentation_sends_the_log(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, data: sent.append((url, json.loads(data))))
    docs = Path(__file__).parents[2] / "docs" / "logs.md"
    (tmp_path / "post.py").write_text(docs.read_text().split("```python\n")[1].split("```")[0])
    kind = find_writer(f"{tmp_path}/post.py:Post")
    assert kind.in_own_process
    for first in (0, 5):
        writer = kind(run_info(tmp_path, first))
        writer.record({"step": first + 5, "train/loss": 0.5})
        writer.close()
    (its_id,) = {entry.pop("run") for _, entry in sent}
    assert its_id
    url = "http://127.0.0.1:8000/log"
    assert sent == [(url, {"step": 5, "train/loss": 0.5}), (url, {"step": 10, "train/loss": 0.5})]


RELATIVE = """
from abc import ABC, abstractmethod
from lockstep.core.writer import Writer
from .helper import NAME


class Notes(Writer):
    name = NAME

    def record(self, entry):
        from .late import TEXT
        self.last = TEXT


class Unfinished(Writer, ABC):
    @abstractmethod
    def record(self, entry): ...
"""


def test_writer_in_a_package_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "writers_of_mine"
    folder.mkdir()
    (folder / "notes.py").write_text(RELATIVE)
    (folder / "helper.py").write_text("NAME = 'my notes'")
    (folder / "late.py").write_text("TEXT = 'late'")
    with pytest.raises(UsageError, match="put an empty __init__") as caught:
        find_writer(f"{folder}/notes.py:Notes")
    assert caught.value.where == f"log.writers: {folder}/notes.py"
    (folder / "__init__.py").write_text("")
    found = find_writer(f"{folder}/notes.py:Notes")
    assert found.name == "my notes"
    assert find_writer(f"{folder}/notes.py:Notes") is found  # a task in the same file stays the same class, too
    writer = found(run_info(tmp_path))
    writer.record({})
    assert writer.last == "late"
    with pytest.raises(UsageError, match="Unfinished lacks record"):
        find_writer(f"{folder}/notes.py:Unfinished")


def test_writer_that_two_packages_declare_is_an_error_that_names_both(package, tmp_path):
    other = tmp_path / "site" / "other-2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2\n")
    (other / "entry_points.txt").write_text("[lockstep.writers]\nnotes = other:Notes\n")
    with pytest.raises(UsageError, match="'notes' is declared twice") as caught:
        find_writer("notes")
    assert {"distribution made-up 1", "distribution other 2"} == set(caught.value.where.split(", "))


def test_writer_that_cannot_be_made_is_told_with_its_entry_class_and_remedy(tmp_path, capsys):
    for name, fault in (("one", "TypeError('no pen')"), ("other", "OSError(28, 'No ink')")):
        (tmp_path / f"{name}.py").write_text(SOURCE.replace("super().__init__(run)", f"raise {fault}"))
    names = [f"{tmp_path}/one.py:Notes", f"{tmp_path}/other.py:Notes"]
    open_writers(run_info(tmp_path), names, quiet=True)
    assert capsys.readouterr().err == (
        "warning: Notes cannot be opened: TypeError: no pen; training continues\n"
        f"  remedy: remove the cause, or leave {names[0]} (class Notes) out of log.writers\n"
        f"warning: Notes of {names[1]} cannot be opened: No ink; training continues\n"
        f"  remedy: remove the cause, or leave {names[1]} (class Notes) out of log.writers\n"
    )


def test_writer_of_an_installed_package_is_found(package):
    assert find_writer("notes").__name__ == "Notes"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "text_logs",
            ["there is no writer 'text_logs'", "did you mean text_log? ", "There are: console, gone, json_lines"],
        ),
        (
            "gone",
            [
                "log.writers: gone of distribution made-up 1",
                "made_up_gone:Gone cannot be loaded for lockstep.writers 'gone': ModuleNotFoundError",
                "repair this distribution, or uninstall it, or leave the writer out",
            ],
        ),
        ("none", ["none of distribution made-up 1", "NoWriter is not a subclass of lockstep.core.writer.Writer"]),
        ("mine.py:Nots", ["mine.py", "no Writer class 'Nots'", "the file has: Notes"]),
        ("mine.py:NoWriter", ["no Writer class 'NoWriter'"]),
        ("other.py:Notes", ["other.py", "no such file", "FILE.py:MyWriter"]),
        ("broken.py:Notes", ["broken.py", "cannot be imported: ZeroDivisionError", "repair the file"]),
    ],
)
def test_writer_that_cannot_be_used_is_named_before_anything_is_written(package, file, tmp_path, name, texts):
    (tmp_path / "broken.py").write_text("1 / 0")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "train.log").write_text("kept")
    settings = runs.config(log={"writers": ["text_log", name]})
    with pytest.raises(UsageError) as caught:
        Trainer(settings, run_dir=run_dir, fresh=True, quiet=True).fit(own_tasks.Plain())
    for text in texts:
        assert text in str(caught.value)
    assert (run_dir / "train.log").read_text() == "kept"
    assert "made-up" in {distribution.name for distribution in metadata.distributions()}
