"""Python processes that have imported torch when they begin: forked from the warm process that `tests.ranks` starts.

`start(function, *arguments)` begins one, and `ended(processes)` waits for them. A new interpreter would first import
torch and the package for 3 s. A test whose subject is that beginning starts an interpreter instead.
"""

import multiprocessing.process
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from lockstep.launch import warm_process
from tests.processes import HANG_S

_folder = tempfile.TemporaryDirectory(prefix="lockstep-forked-")


def start(function, *arguments, cwd=None, **variables):
    """A process that calls an importable function, with more environment variables."""
    place = tempfile.mkdtemp(dir=_folder.name)
    return warm_process.start_process(_call, place, cwd, function, arguments, **variables), Path(place)


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


def observed(folder, path, *arguments):
    """For `start`: what `python -m lockstep_audit --folder FOLDER PATH ARGUMENTS` does."""
    from lockstep_audit.__main__ import main

    sys.argv[:] = [str(path), *map(str, arguments)]
    main(["--folder", str(folder), *sys.argv])


def _call(place, cwd, function, arguments):
    multiprocessing.process._parent_process = None  # as in a process that the shell starts
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    if cwd is not None:
        os.chdir(cwd)
    function(*arguments)
