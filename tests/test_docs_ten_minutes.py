"""docs/ten_minutes.md: its commands run in their order, and print what the page quotes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.guide_commands import differences, quoted
from tests.processes import ROOT, environment, launched

PAGE = ROOT / "docs" / "ten_minutes.md"
CHECK = "lockstep verify train.py"
TIMES = re.compile(r"(?<=in )[\d.]+ s\b|\([\d.]+ s\)$|(?<=resuming runs/train at step )\d+", re.MULTILINE)
"""What differs between two machines. The step at which a killed run resumes depends on the moment of the kill."""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def changed(script):
    """The script after the diff of the page."""
    for hunk in blocks("diff")[0].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


class Session:
    """A shell in a new folder, as a reader of the page has it."""

    def __init__(self, folder):
        self.folder, self.behind = folder, None
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = environment(PATH=path, CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")

    def output_of(self, command, quote=""):
        """What a command prints. One with `&` at its end has printed the quote, and still runs."""
        if command.endswith("&"):
            self.behind = self._start(f"exec {command.removesuffix('&')}")
            return "".join(self._lines_until(quote.splitlines()[-2].removesuffix(" ...")))
        process = self._start(command.replace("$!", str(self.behind and self.behind.pid)))
        printed, _ = process.communicate()
        if "kill" in command:
            assert self.behind.wait() == -signal.SIGKILL
            self.behind.communicate()  # until its ranks have ended
        assert process.returncode == 0, printed
        return printed

    def _start(self, command):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment, **pipes)

    def _lines_until(self, last):
        for line in self.behind.stdout:
            yield line
            if line.startswith(last):
                return


def write_scripts(folder, *, with_loop):
    plain, use = blocks("python")
    (folder / "train.py").write_text(changed(plain) if with_loop else plain)
    (folder / "use.py").write_text(use)


def run_page(folder):
    """The commands of the page, without the one that takes longest: triples of command, quote and output."""
    folder, found = Path(folder), []
    session, starts = Session(folder), 0
    for command, quote in quoted(PAGE.read_text()):
        starts += command == "python train.py"
        write_scripts(folder, with_loop=starts > 1)
        if command != CHECK:
            found.append((command, quote, session.output_of(command, quote)))
    return found


def run_check(folder):
    write_scripts(Path(folder), with_loop=True)
    quote = next(quote for command, quote in quoted(PAGE.read_text()) if command == CHECK)
    return [(CHECK, quote, Session(folder).output_of(CHECK))]


def compare(found):
    for command, quote, printed in found:
        assert differences(*(TIMES.sub("#", text) for text in (quote, printed))) == [], command


@launched(run_page)
def test_commands_print_what_the_page_quotes(launch):
    assert len(launch.done[0]) == 9
    compare(launch.done[0])


@pytest.mark.exhaustive  # tests of `lockstep verify` check such a script
@launched(run_check)
def test_verify_prints_what_the_page_quotes(launch):
    compare(launch.done[0])


def test_the_model_is_used_without_lockstep():
    plain, use = blocks("python")
    assert "lockstep" not in plain + use
    assert len(plain.splitlines()) <= 42


def test_the_page_has_at_most_six_concepts():
    rows = PAGE.read_text().partition("| concept |")[2].partition("\n\n")[0].splitlines()[2:]
    assert 0 < len(rows) <= 6


if __name__ == "__main__":  # python -m tests.test_docs_ten_minutes: print the outputs of all commands
    with tempfile.TemporaryDirectory() as folder:
        for command, _, printed in [*run_page(folder), *run_check(folder)]:
            print(f"$ {command}\n{printed}", flush=True)
