"""Python processes that have imported torch when they begin: forked from Python's fork server.

`start(function, *arguments)` begins one, and `ended(processes)` waits for them. A new interpreter would first import
torch for 3 s. A test whose subject is that beginning starts an interpreter instead. Nothing here needs torch-lockstep.
Where its tests run in the same process, they have a fork server already, and this one is the same.
"""

import atexit
import multiprocessing
import multiprocessing.process
import os
import runpy
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

from packages.audit.tests.processes import HANG_S

MODULES = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel.distributed"]

folder = tempfile.TemporaryDirectory(prefix="lockstep-audit-forked-")


def start(function, *arguments, cwd=None, **variables):
    """A process that calls an importable function, with more environment variables."""
    place = tempfile.mkdtemp(dir=folder.name)
    multiprocessing.set_forkserver_preload(MODULES)  # counts until the fork server runs
    environment = dict(os.environ) | variables
    process = multiprocessing.get_context("forkserver").Process(
        target=_call, args=(environment, place, cwd, function, arguments)
    )
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # else the process would import pytest's
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process, Path(place)


def ended(processes):
    """For each process its return code and what it printed."""
    done = []
    for process, place in processes:
        process.join(HANG_S)
        assert process.exitcode is not None, "it still runs"
        printed = {name: (place / name).read_text() for name in ("stdout", "stderr") if (place / name).exists()}
        done.append(SimpleNamespace(returncode=process.exitcode, **printed))
    return done


def script(path, *arguments):
    """For `start`: what `python PATH ARGUMENTS` does."""
    sys.argv[:] = [str(path), *map(str, arguments)]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(str(path), run_name="__main__")


def observed(events, path, *arguments):
    """For `start`: what `python -m lockstep_audit --folder EVENTS PATH ARGUMENTS` does."""
    from lockstep_audit.__main__ import main

    sys.argv[:] = [str(path), *map(str, arguments)]
    main(["--folder", str(events), *sys.argv])


def _call(environment, place, cwd, function, arguments):
    """Makes the process like a new interpreter, and ends it like one."""
    os.setsid()
    os.environ.clear()  # a forked process has the environment variables of the fork server
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # else loader workers would be started as this process was
    multiprocessing.current_process().name = "MainProcess"  # libraries take other names for helpers of a main process
    multiprocessing.process._parent_process = None  # as in a process that the shell starts
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    if cwd is not None:
        os.chdir(cwd)
    try:
        function(*arguments)
    finally:
        # A process of `multiprocessing` ends without functions of `atexit`. An interpreter first waits for threads.
        threading._shutdown()
        atexit._run_exitfuncs()
