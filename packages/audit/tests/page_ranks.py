"""Runs scripts under the observers on forked ranks of one process that has imported torch: a second for each script."""

import contextlib
import importlib
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path

RANKS = 2
LIMIT_S = 300.0  # for one run of a script, on however slow a machine
END_S = 60.0  # for the last rank to end after the first: gloo's threads keep one in some hundred from ending


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def rank(number, port, script, folder, patience, *, arguments, work):
    """A rank. Never returns."""
    from lockstep_audit.__main__ import main
    from lockstep_audit.observe.recorder import recorder

    os.setsid()  # workers of its loaders are killed with it
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCKSTEP_AUDIT_JUDGED_OUTSIDE": "1"}
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    if work is None:
        os.chdir(Path(script).parent)
    else:
        os.environ["TORCHELASTIC_RUN_ID"] = str(port)  # by which Lightning knows its launcher
        _seed_as_a_new_process()
        os.chdir(work)
    code = 0
    try:
        main(["--folder", folder, "--patience", str(patience), script, *arguments])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        recorder.end()
        os._exit(code)


def _seed_as_a_new_process():
    """Ranks that a launcher starts have generators of their own, and not those of the process that was forked."""
    import numpy
    import torch

    torch.seed()
    random.seed()
    numpy.random.seed()


def run(script, folder, patience, *, arguments=(), work=None):
    """Run a script on both ranks. Given `work`, in that folder and as a launcher would start it.

    Returns:
        whether all ranks ended, or hung where the observers see it.
    """
    from lockstep_audit.run import _Tails

    port, tails, left = free_port(), _Tails(Path(folder), patience), set()
    for number in range(RANKS):
        pid = os.fork()
        if not pid:
            rank(number, port, script, folder, patience, arguments=arguments, work=work)
        left.add(pid)
    end = time.monotonic() + LIMIT_S
    while left:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if len(left) < RANKS:
            end = min(end, time.monotonic() + END_S)
        if left and (tails.hang(RANKS) or time.monotonic() > end):
            for pid in left:
                _kill(pid)
        time.sleep(0.05)
    return time.monotonic() < end


def _kill(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it leads no session yet
        os.kill(pid, signal.SIGKILL)


def main(jobs):
    """For `forked.start`. A job is a script, the folder of its events, and the patience."""
    from lockstep_audit.observe import torch_private

    assert torch_private  # ranks need not import it
    for script, folder, patience in jobs:
        run(script, folder, patience)


def run_cases(jobs, libraries):
    """For `forked.start`. A job is a script, a folder, the patience, and the arguments of each run in a row.

    Run N leaves its events in `folder/events-N`. All runs work in `folder/work`.
    """
    import torch

    from lockstep_audit.observe import torch_private

    assert torch_private
    torch.set_num_threads(1)
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for script, folder, patience, runs in jobs:
        Path(folder, "work").mkdir()
        for number, arguments in enumerate(runs):
            events = f"{folder}/events-{number}"
            if not run(script, events, patience, arguments=arguments, work=f"{folder}/work"):
                shutil.rmtree(events, ignore_errors=True)
                run(script, events, patience, arguments=arguments, work=f"{folder}/work")
