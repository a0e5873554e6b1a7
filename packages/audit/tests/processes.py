"""What tests that start programs need."""

import os
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).resolve().parents[1] / "src"
HANG_S = 900.0
"""Seconds that only a hang takes, also on a slow machine with other work. Tests wait so long for what must come."""
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_STORE")


def environment(**extra):
    """The variables of this process, without those of ranks: a test may have set them here."""
    clean = {name: value for name, value in os.environ.items() if name not in _RANKS}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])} | extra


def wait_for(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
