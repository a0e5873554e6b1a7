"""The `lockstep` command in processes of its own, as a user runs it.

Starting such processes takes most of their time, and most tests leave a core idle. So what a test only looks at when it has
ended is run beside the tests before it: `@launched(command, ...)` says what, and the fixture `launch` waits for the end.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**extra):
    """Without the variables of ranks, which the pool of warm ranks may have left here."""
    clean = {name: value for name, value in os.environ.items() if name not in _RANKS}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra


def command(*arguments, torchrun=None):
    if torchrun:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(torchrun), "-m", "lockstep", *map(str, arguments)]
    return [sys.executable, "-m", "lockstep", *map(str, arguments)]


def lockstep(*arguments, torchrun=None, timeout=120, **extra):
    """Run to the end; `extra` are environment variables."""
    return subprocess.run(command(*arguments, torchrun=torchrun), capture_output=True, text=True, timeout=timeout, env=environment(**extra))


def start(*arguments, torchrun=None, **extra):
    """Run beside the test, in a session of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*arguments, torchrun=torchrun), env=environment(**extra), start_new_session=True, **pipes)


def wait_for(condition, timeout=60):
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


def is_running(pid):
    """Alive, and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- beside other tests


def launched(*commands, torchrun=None, **extra):
    """Commands that run one after another, whatever tests do; "{folder}" is theirs, with the module's TASKS in tasks.py. Tests may share a mark."""
    return pytest.mark.launched(*commands, torchrun=torchrun, **extra)


class Launch:
    """The commands of one mark. `done`: how each ended, as subprocess.run tells it."""

    def __init__(self, mark, module):
        self.mark, self.tasks = mark, getattr(module, "TASKS", "")
        self.left, self.folder, self.process, self.done = list(mark.args), None, None, []

    def go_on(self):
        """Start the next command where none is running; whether there is anything left."""
        if self.process and self.process.poll() is not None:
            out, errors = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
            self.done.append(SimpleNamespace(returncode=self.process.returncode, stdout=out, stderr=errors))
            self.process = None
        if self.process is None and self.left:
            self._start(self.left.pop(0))
        return self.process is not None

    def _start(self, arguments):
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="lockstep-launch-"))
            (self.folder / "tasks.py").write_text(self.tasks)
        options = dict(self.mark.kwargs)
        torchrun = options.pop("torchrun")
        filled = [str(argument).replace("{folder}", str(self.folder)) for argument in arguments]
        extra = {name: value.replace("{folder}", str(self.folder)) for name, value in options.items()}
        with (self.folder / "stdout").open("w") as out, (self.folder / "stderr").open("w") as errors:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
            self.process = subprocess.Popen(command(*filled, torchrun=torchrun), env=environment(**extra), start_new_session=True, **streams)

    def end(self):
        if self.process and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class Beside:
    """All launches that the chosen tests ask for, one at a time and in the order of the tests."""

    def __init__(self):
        self.launches = {}

    def plan(self, items):
        for item in items:
            mark = item.get_closest_marker("launched")
            if mark:
                self.launches.setdefault(id(mark), Launch(mark, item.module))

    def go_on(self):
        for launch in self.launches.values():
            if launch.go_on():
                return

    def wait(self, item, timeout=200):
        launch = self.launches[id(item.get_closest_marker("launched"))]
        deadline = time.monotonic() + timeout
        while launch.go_on():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return launch

    def close(self):
        for launch in self.launches.values():
            launch.end()


beside = Beside()
