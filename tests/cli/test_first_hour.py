"""The first hour on a new machine: the list of commands, the table in the documentation, the page, and a whole run."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep_recipes.commands import first_hour
from lockstep_recipes.commands.first_hour import FirstHourStep

ROOT = Path(__file__).resolve().parents[2]


def table(steps):
    """The rows of the table in docs/gpu.md."""
    return [f"| {number} | `{step}` | {step.shows} | `{step.prints}` |" for number, step in enumerate(steps, 1)]


def test_the_table_of_the_documentation_is_the_list_that_the_command_runs():
    section = (ROOT / "docs" / "gpu.md").read_text().partition("## The first hour on a new machine\n")[2]
    rows = re.findall(r"^\| \d+ \|.*\|$", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == table(first_hour.steps(8, Path("first_hour")))


def test_each_command_is_written_as_the_command_line_takes_it():
    """Names of commands and of options. That they run is shown by the slow test below, and by no other."""
    import typer

    known = typer.main.get_command(app).commands
    for step in first_hour.steps(2, Path("out")):
        name, *words = shlex.split(step.command)
        command = known[name].commands[words[0]] if name == "doctor" else known[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, step
        assert "{" not in str(step)


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.core.devices.gpus", lambda: 0)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", "first-hour", *arguments])


def steps_of(monkeypatch, *steps):
    monkeypatch.setattr(first_hour, "steps", lambda nproc, out: list(steps))


def test_the_page_has_what_each_command_printed_and_whether_it_is_what_it_must(call, tmp_path, monkeypatch):
    steps_of(
        monkeypatch,
        FirstHourStep("the presets", "doctor presets", "h100x8"),
        FirstHourStep("a GPU", "doctor presets", "h100x8", needs_gpu=True),
        FirstHourStep("a wrong word", "doctor presets", "h300x8"),
        FirstHourStep("an error", "checkpoints hour/none", "", {"SOME": "3"}),
    )
    done = call("--nproc", "3", "--run-dir", "hour")
    assert done.exit_code == 3
    page = (tmp_path / "hour" / "first_hour.md").read_text()
    states = re.findall(r"^\| (\d) \| `(.*?)` \|.*\| ([^|]*) \| [\d.]+ \|$", page, re.MULTILINE)
    assert states == [
        ("1", "lockstep doctor presets", "passed"),
        ("2", "lockstep doctor presets", "skipped: no GPU"),
        ("3", "lockstep doctor presets", "FAILED"),
        ("4", "SOME=3 lockstep checkpoints hour/none", "FAILED"),
    ]
    assert "    h100x8 " in page.partition("## 1. passed")[2].partition("## 2.")[0]
    assert "not a run directory" in page.partition("## 4. FAILED")[2]
    assert "exit code " in page.partition("## 4. FAILED")[2]
    assert done.stdout.count("FAILED") == 2


def test_where_all_went_well_the_exit_code_is_0(call, monkeypatch):
    steps_of(monkeypatch, FirstHourStep("nothing", "doctor presets", "", needs_gpu=True))
    done = call()
    assert done.exit_code == 0
    assert "written: first_hour/first_hour.md" in done.stdout


def test_a_folder_with_files_and_a_name_with_a_space_are_refused(call, tmp_path, monkeypatch):
    steps_of(monkeypatch)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for folder in ("mine", "two words"):
        done = call("--run-dir", folder)
        assert done.exit_code == 2
        assert f"{folder}: has files already, or a name" in done.stderr


@pytest.mark.exhaustive
def test_all_commands_of_the_first_hour_print_what_they_must(call, tmp_path, monkeypatch):
    """They take a minute: each is a program that imports torch."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = call("--run-dir", str(tmp_path / "hour"))
    page = (tmp_path / "hour" / "first_hour.md").read_text()
    assert done.exit_code == 0, page
    assert [row.split(" | ")[-2] for row in page.splitlines() if re.match(r"\| \d", row)] == [
        "skipped: no GPU" if step.needs_gpu else "passed" for step in first_hour.steps(2, tmp_path)
    ]
