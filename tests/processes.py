"""The `lockstep` command in processes of its own, as a user runs it.

Most of the time of such a test is spent in starting the processes, and most other tests leave one core idle. So the
commands run in the background while other tests run: `@launched(command, ...)` states the commands of a test, and the
fixture `launch` waits until they have ended. A test that sends signals to a command, or kills it, gives `@launched` a
function instead of the command.
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
HANG_S = 900.0
"""Seconds that only a hang takes, also on a slow machine with other work. Tests wait so long for what must come."""
_started = []
"""The processes that `start` has started in this process."""
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_STORE")


def environment(**extra):
    """The variables of this process, without those of ranks: a test may have set them here."""
    clean = {name: value for name, value in os.environ.items() if name not in _RANKS}
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [clean.get("PYTHONPATH")])]
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | extra


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


def lockstep(*arguments, torchrun=None, **extra):
    """Run the command to its end. `extra` are environment variables."""
    return subprocess.run(
        command(*arguments, torchrun=torchrun),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=environment(**extra),
    )


def start(*arguments, torchrun=None, **extra):
    """Start the command in a session of its own, and return its process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command(*arguments, torchrun=torchrun), env=environment(**extra), start_new_session=True, **pipes
    )
    _started.append(process)
    return process


def wait_for(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_logged(run):
    """Whether a run has written the first entry of its log."""
    path = run / "metrics.jsonl"
    return path.exists() and bool(path.read_text())


def ranks_of(launcher):
    """Process ids of the ranks that `lockstep` has started, which are forked from a child of it."""
    return [rank for child in children(launcher) for rank in children(child)]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def handles(pid, number):
    """Whether a process has installed a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def is_running(pid):
    """Whether a process is alive, and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- in the background of other tests


def count_commands(items):
    """How many commands, and functions that start some, the tests ask for with `launched`."""
    marks = {id(mark): mark for item in items if (mark := item.get_closest_marker("launched"))}
    return sum(len(mark.args) for mark in marks.values())


def launched(*commands, torchrun=None, **extra):
    """Mark a test with the commands that it needs. They run one after another, in the background of other tests.

    In an argument, "{folder}" stands for a folder of the commands, in which tasks.py holds the module's TASKS. Several
    tests may have the same mark; its commands then run once. A function among `commands` is called with the folder, in
    a process that is forked before the first test: it can use neither torch nor ranks.

    Args:
        torchrun: start the commands under torchrun with this many ranks.
        extra: environment variables.
    """
    return pytest.mark.launched(*commands, torchrun=torchrun, **extra)


class Launch:
    """The commands of one mark."""

    def __init__(self, mark, module):
        self.mark, self.tasks, self.folder = mark, getattr(module, "TASKS", ""), None
        self.done = []
        """For each command its return code and output; for each function what it returned."""

    def prepare(self):
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-launch-"))
        (self.folder / "tasks.py").write_text(self.tasks)

    def run(self):
        """Run all commands, and write the results into the folder. Nothing, where another process has begun them."""
        try:
            (self.folder / "begun").mkdir()
        except FileExistsError:
            return
        try:
            results = [self._call(command) if callable(command) else self._run(command) for command in self.mark.args]
        except BaseException as error:
            results = traceback.format_exc()
            if not isinstance(error, Exception):
                raise
        finally:
            for process in _started:
                _kill(process)
            _started.clear()
        (self.folder / "done.new").write_bytes(pickle.dumps(results))
        (self.folder / "done.new").rename(self.folder / "done")

    def _call(self, function):
        return function(self.folder)

    def _run(self, arguments):
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
    """Kill a process and all others of its session, unless it has ended already."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        stream.close()


class Background:
    """All launches that the chosen tests ask for.

    A process of its own runs them one at a time, in the order of the tests. While a test waits, it runs launches too.
    """

    def __init__(self):
        self.launches, self.process = {}, None

    def plan(self, items):
        for item in items:
            mark = item.get_closest_marker("launched")
            if mark:
                self.launches.setdefault(id(mark), Launch(mark, item.module))

    def start(self):
        """Fork the process. A new process would have to import all modules again, because marks hold functions."""
        for launch in self.launches.values():
            launch.prepare()
        if self.launches:
            with warnings.catch_warnings():
                # Newer Pythons warn about a fork where there are threads. The process takes no lock of a thread.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process = multiprocessing.get_context("fork").Process(target=self._run, daemon=True)
                self.process.start()

    def _run(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        parent = os.getppid()
        for launch in self.launches.values():
            if os.getppid() == parent:
                launch.run()

    def wait(self, item):
        """The launch of a test, when its commands have ended."""
        launch = self.launches[id(item.get_closest_marker("launched"))]
        deadline = time.monotonic() + HANG_S
        while not (launch.folder / "done").exists():
            assert time.monotonic() < deadline
            for other in self.launches.values():
                if not (other.folder / "begun").exists():
                    other.run()
                    break
            alive = self.process.is_alive() or (launch.folder / "done").exists()
            assert alive, "the process that runs the commands has ended"
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


background = Background()
