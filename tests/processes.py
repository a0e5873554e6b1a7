"""The `lockstep` command in processes of its own, as a user runs it.

Starting such processes takes most of their time, and most tests leave a core idle. So what a test only looks at when it has
ended is run beside the tests before it: `@launched(command, ...)` says what, and the fixture `launch` waits for the end. What
signals or kills such a process while it runs is a function, which `@launched` takes in a command's place.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
_begun = []  # by `start` in this process
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_STORE")


def environment(**extra):
    """Without the variables of ranks, which the pool of warm ranks may have left here."""
    clean = {name: value for name, value in os.environ.items() if name not in _RANKS}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra


def command(*arguments, torchrun=None):
    if torchrun:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(torchrun),
            "-m",
            "lockstep",
            *map(str, arguments),
        ]
    return [sys.executable, "-m", "lockstep", *map(str, arguments)]


def lockstep(*arguments, torchrun=None, timeout=120, **extra):
    """Run to the end; `extra` are environment variables."""
    return subprocess.run(
        command(*arguments, torchrun=torchrun),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**extra),
    )


def start(*arguments, torchrun=None, **extra):
    """Run beside the test, in a session of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command(*arguments, torchrun=torchrun), env=environment(**extra), start_new_session=True, **pipes
    )
    _begun.append(process)
    return process


def wait_for(condition, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_logged(run):
    """Whether a run has written its first entry."""
    path = run / "metrics.jsonl"
    return path.exists() and bool(path.read_text())


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def handles(pid, number):
    """Whether a process has said what it does at a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def is_running(pid):
    """Alive, and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- beside other tests


def launched(*commands, torchrun=None, **extra):
    """Commands that run one after another, whatever tests do; "{folder}" is theirs, with the module's TASKS in tasks.py. Tests may share a mark.

    A function in a command's place is called with that folder: in a process forked before the first test, so without torch, and without ranks.
    """
    return pytest.mark.launched(*commands, torchrun=torchrun, **extra)


class Launch:
    """The commands of one mark. `done`: how each ended, as subprocess.run tells it, or what the function returned."""

    def __init__(self, mark, module):
        self.mark, self.tasks, self.folder, self.done = mark, getattr(module, "TASKS", ""), None, []

    def prepare(self):
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-launch-"))
        (self.folder / "tasks.py").write_text(self.tasks)

    def run(self):
        """Everything, and leave what is found in the folder: in the process beside, or where a test waits and nobody else has begun it."""
        try:
            (self.folder / "begun").mkdir()
        except FileExistsError:
            return
        try:
            found = [self._function(one) if callable(one) else self._command(one) for one in self.mark.args]
        except BaseException as error:
            found = traceback.format_exc()
            if not isinstance(error, Exception):
                raise
        finally:
            for process in _begun:
                _kill(process)
            _begun.clear()
        (self.folder / "done.new").write_bytes(pickle.dumps(found))
        (self.folder / "done.new").rename(self.folder / "done")

    def _function(self, function):
        return function(self.folder)

    def _command(self, arguments):
        options = dict(self.mark.kwargs)
        torchrun = options.pop("torchrun")
        filled = [str(argument).replace("{folder}", str(self.folder)) for argument in arguments]
        extra = {name: value.replace("{folder}", str(self.folder)) for name, value in options.items()}
        process = start(*filled, torchrun=torchrun, **extra)
        out, errors = process.communicate()
        return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=errors)

    def end(self):
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _kill(process):
    """With all in its session; nothing where it has ended already."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        stream.close()


class Beside:
    """All launches that the chosen tests ask for, one at a time and in the order of the tests, by a process of their own; by two where a test waits."""

    def __init__(self):
        self.launches, self.process = {}, None

    def plan(self, items):
        for item in items:
            mark = item.get_closest_marker("launched")
            if mark:
                self.launches.setdefault(id(mark), Launch(mark, item.module))

    def start(self):
        """A fork: marks hold functions, and importing all anew would take as long as a test."""
        for launch in self.launches.values():
            launch.prepare()
        if self.launches:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # newer Pythons warn where there are threads; none of this takes a lock
                self.process = multiprocessing.get_context("fork").Process(target=self._run, daemon=True)
                self.process.start()

    def _run(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        parent = os.getppid()
        for launch in self.launches.values():
            if os.getppid() == parent:
                launch.run()

    def wait(self, item, timeout=200):
        launch = self.launches[id(item.get_closest_marker("launched"))]
        deadline = time.monotonic() + timeout
        while not (launch.folder / "done").exists():
            assert time.monotonic() < deadline
            for other in self.launches.values():
                if not (other.folder / "begun").exists():
                    other.run()
                    break
            assert self.process.is_alive() or (launch.folder / "done").exists(), (
                "the process beside the tests has ended"
            )
            time.sleep(0.05)
        launch.done = pickle.loads((launch.folder / "done").read_bytes())
        assert not isinstance(launch.done, str), launch.done
        return launch

    def close(self):
        if self.process:
            self.process.terminate()
            self.process.join()
            self.process.close()
        for launch in self.launches.values():
            launch.end()


beside = Beside()
