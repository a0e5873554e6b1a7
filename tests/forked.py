"""Python processes that have imported torch when they begin: forked from the warm process that `tests.ranks` starts.

`start(function, *arguments)` begins one, and `ended(processes)` waits for them. A new interpreter would first import
torch and the package for 3 s. A test whose subject is that beginning starts an interpreter instead.

A command that starts ranks has a warm process of its own. Here this one is forked from the command, so that it need not
import anything either. All else is as users have it: the same processes below each other, sessions, pipes and signals.
"""

import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace

from lockstep.launch import preload, warm_process

_folder = tempfile.TemporaryDirectory(prefix="lockstep-forked-")


class Process:
    """What `subprocess.Popen` gives for a process with pipes. It leads a session."""

    def __init__(self, process, place):
        self._process, self._place, self.pid = process, place, process.pid

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return tuple((self._place / name).read_text() for name in ("stdout", "stderr"))

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start(function, *arguments, cwd=None, environment=None):
    """A process that calls an importable function. `environment`: all its variables. None: those of this process."""
    place = Path(tempfile.mkdtemp(dir=_folder.name))
    ignored = [number for number in preload.IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    environment = dict(os.environ) if environment is None else environment
    call = (str(place), cwd, function, arguments)
    return Process(warm_process._start("forkserver", environment, ignored, _call, call), place)


def ended(processes):
    """For each process its return code and what it printed."""
    printed = [process.communicate() for process in processes]
    return [
        SimpleNamespace(returncode=process.returncode, stdout=out, stderr=errors)
        for process, (out, errors) in zip(processes, printed, strict=True)
    ]


def allow_here():
    """A process that was forked from the one that started the warm process may `start` processes, too."""
    multiprocessing.process.current_process()._config["daemon"] = False
    forkserver._forkserver.ensure_running = lambda: None  # it would wait for the warm process as for its own child


# ---- what a process does


def script(path, *arguments):
    """For `start`: what `python PATH ARGUMENTS` does."""
    sys.argv[:] = [str(path), *map(str, arguments)]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(str(path), run_name="__main__")


def command(*arguments):
    """For `start`: what `python -m lockstep ARGUMENTS` does."""
    sys.argv[1:] = arguments
    runpy.run_module("lockstep", run_name="__main__", alter_sys=True)


def observed(folder, path, *arguments):
    """For `start`: what `python -m lockstep.audit --folder FOLDER PATH ARGUMENTS` does."""
    from lockstep.audit.__main__ import main

    sys.argv[:] = [str(path), *map(str, arguments)]
    main(["--folder", str(folder), *sys.argv])


def _call(place, cwd, function, arguments):
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if cwd is not None:
        os.chdir(cwd)
    _be_a_program()
    function(*arguments)


def _be_a_program():
    """Forget what `multiprocessing` knows of the process that this was forked from."""
    multiprocessing.process._parent_process = None
    config = multiprocessing.process.current_process()._config
    for name in ("tempdir", "daemon"):
        config.pop(name, None)
    forkserver._forkserver.__init__()
    multiprocessing.util.spawnv_passfds = _fork_the_warm_process


_spawn = multiprocessing.util.spawnv_passfds


def _fork_the_warm_process(path, arguments, files):
    """Instead of `multiprocessing.util.spawnv_passfds`, which starts a new interpreter."""
    code = arguments[-1]
    if "multiprocessing.forkserver" not in code:
        return _spawn(path, arguments, files)
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in files:
                with contextlib.suppress(OSError):
                    os.close(number)
        signal.set_wakeup_fd(-1)
        forkserver._forkserver.__init__()
        resource_tracker._resource_tracker.__init__()
        sys.modules.pop(preload.__name__, None)  # its import does the work
        exec(code, {"__name__": "__main__"})
    finally:
        os._exit(0)
