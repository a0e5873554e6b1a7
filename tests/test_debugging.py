"""Breakpoints: on one rank of several, on one rank alone, and where there is no terminal."""

import bdb
import contextlib
import os
import pty
import sys
import threading

import pytest

from lockstep.core import debugging
from lockstep.core.errors import UsageError
from tests.processes import command, environment

TASK = """
import os
import torch
from lockstep import Task

class Stopping(Task):
    calls = 0

    def model(self):
        return torch.nn.Linear(3, 1)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(16, 3), torch.ones(16, 1))

    def loss(self, model, batch):
        self.calls += model.training
        if self.calls == 2 and model.training:
            breakpoint()
        return (model(batch[0]) - batch[1]).square().sum()
"""


def in_a_terminal(arguments, folder, answers):
    """Run a command in a pseudo-terminal, type `answers` at the debugger's first prompt; its output and exit code."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(arguments[0], arguments, environment())
    seen = b""
    while True:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if answers and b"(Pdb)" in seen:
            os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
            answers = ()
    return seen.decode(), os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [["--nproc", "2", "--debug-rank", "1"], []], ids=["rank 1 of 2", "alone"])
def test_a_debugger_has_the_terminal_for_as_long_as_it_likes(tmp_path, options):
    (tmp_path / "task.py").write_text(TASK)
    longer_than_allowed = "import time; time.sleep(25)"
    arguments = command(
        "train", "task.py:Stopping", *options, "batch.global=4", "train.steps=3", "parallel.timeout_s=20"
    )
    output, code = in_a_terminal(
        arguments, tmp_path, [longer_than_allowed, "p 'rank', os.environ.get('RANK'), self.calls", "c"]
    )
    assert code == 0, output
    assert f"('rank', {repr('1') if options else None}, 2)" in output
    assert "step 3/3" in output
    assert output.count("-> return (model(batch[0])") == 1  # the other rank does not stop


def test_a_thread_in_the_debugger_is_seen():
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(bdb.Bdb):
        def user_line(self, frame):
            inside.set()
            go_on.wait()
            self.set_quit()

    def stops():
        with contextlib.suppress(bdb.BdbQuit):
            Waiting().runcall(sorted, [2, 1], key=lambda number: -number)

    thread = threading.Thread(target=stops)
    assert not debugging.is_in_debugger(threading.main_thread().ident)
    thread.start()
    inside.wait()
    assert debugging.is_in_debugger(thread.ident)
    go_on.set()
    thread.join()
    assert not debugging.is_in_debugger(thread.ident or 0)


def test_breakpoints_of_other_ranks_do_nothing(monkeypatch):
    import pdb  # noqa: T100

    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(pdb, "set_trace", pdb.set_trace)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(debugging.RANK, "0")
    debugging.attach()
    breakpoint()  # noqa: T100
    pdb.set_trace()  # noqa: T100


@pytest.mark.parametrize(("rank", "message"), [("2", "there is no rank 2"), ("0", "a debugger needs a terminal")])
def test_a_rank_that_cannot_be_debugged_is_an_error(monkeypatch, rank, message):
    monkeypatch.setenv(debugging.RANK, rank)
    with open(os.devnull) as nothing, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", nothing)
        with pytest.raises(UsageError, match=message):
            debugging.offer_terminal(2)


def test_a_breakpoint_without_a_terminal_says_what_gives_it_one(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with open(os.devnull) as nothing, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", nothing)
        error = debugging.explanation(bdb.BdbQuit())
    assert isinstance(error, UsageError)
    assert "rank 0: a breakpoint was reached, and this process has no terminal" in str(error)
    assert "--debug-rank 0" in str(error)
    assert debugging.explanation(ValueError()) is None
