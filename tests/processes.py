"""The `lockstep` command in processes of its own, as a user runs it."""

import os
import subprocess
import sys
import time
from pathlib import Path

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
