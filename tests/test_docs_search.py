"""The examples of docs/search.md run as they stand: the trials of the sweep on warm ranks."""

import contextlib
import os
import re
import shlex
from subprocess import CompletedProcess

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep_lab.search import batch_size, grid, sweep
from tests.processes import ROOT
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "search.md").read_text()
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^    (lockstep .*)$", PAGE, re.MULTILINE)]
SHORT = ["device=cpu", "log.writers=[json_lines]", "log.pictures=0", "log.flops=false"]


def call(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def call_in(folder, *arguments):
    with contextlib.chdir(folder):  # a warm rank may have begun in another folder
        return call(*arguments)


def of(*words):
    """The last command of the page that begins with these words."""
    return next(one for one in reversed(COMMANDS) if one[: len(words)] == list(words))


def like(text):
    """The words of a text without its numbers."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,e+-]*", "N", text)).strip()


def shown(after):
    """The output that follows a text of the page."""
    return PAGE.partition(after)[2].partition("```text\n")[2].partition("```")[0]


@pytest.mark.exhaustive  # packages/lab/tests/search tests the command with less data
def test_the_range_test_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output = call(*of("tune", "lr"))
    assert code == 0, output
    assert like(output) == like(shown("## A learning rate"))
    rate = float(re.search(r"descent: +optim.lr=(\S+)", output)[1])
    assert 0.5 < rate / float(re.search(r"descent: +optim.lr=(\S+)", PAGE)[1]) < 2
    assert [one.name for one in tmp_path.iterdir()] == ["digits-lr.svg"]
    assert call(*of("tune", "lr"), "--steps", "10")[0] == 0  # its own chart is written anew
    (tmp_path / "digits-lr.svg").write_text("<svg>of somebody</svg>")
    code, output = call(*of("tune", "lr"))
    assert (code, "is not overwritten" in output) == (2, True)


@pytest.mark.exhaustive
def test_the_largest_micro_batch_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def in_this_process(command, **_):
        code, output = call(*command[3:])
        return CompletedProcess(command, code, "", output)

    monkeypatch.setattr(batch_size.subprocess, "run", in_this_process)
    code, output = call(*of("tune", "batch"), "--most", "4", "device=cpu")
    assert code == 0, output
    assert [int(size) for size in re.findall(r"^ +(\d+) +[\d,]+ samples/s", output, re.MULTILINE)] == [2, 4]
    assert "keys: batch.micro=4" in output
    assert not list(tmp_path.iterdir())


class OnWarmRank:
    """A training that runs to its end when it is started."""

    def __init__(self, arguments, log, environment):
        ((self.code, output),) = run_ranks(1, call_in, os.getcwd(), *arguments, *SHORT)
        log.write_text(output)

    def poll(self):
        return self.code

    def stop(self):
        pass


@pytest.mark.exhaustive
def test_the_sweep_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sweep.Sweep.__init__, "__kwdefaults__", sweep.Sweep.__init__.__kwdefaults__ | {"start": OnWarmRank}
    )
    (tmp_path / "grid.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    code, output = call(*of("sweep", "digits"))
    assert code == 0, output
    expected = shown("## A sweep")
    begun = re.compile(r"trial \d+ starts: .*")
    assert begun.findall(output) == begun.findall(expected)  # the values, which are the same on every machine
    results = [float(one) for one in re.findall(r"done: eval/accuracy (\S+),", output)]
    told = [float(one) for one in re.findall(r"done: eval/accuracy (\S+),", expected)]
    assert max(abs(here - there) for here, there in zip(results, told, strict=True)) < 0.05
    best = config_file.load("runs/digits-sweep/best.yaml")
    assert f"{best.optim.lr:.4g}" in output.partition("state\n")[2].splitlines()[0]
    code, output = call("evaluate", "runs/digits-sweep/trial-0000")
    assert (code, "accuracy" in output) == (0, True), output


def test_the_page_has_all_settings():
    for name in (*grid._KNOWN, *grid.SAMPLERS, *grid.PRUNERS, *grid.DIRECTIONS):
        assert f"`{name}`" in PAGE, name
