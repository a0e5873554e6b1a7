"""A lock keeps other processes out exactly as long as its process lives."""

import os
import signal
import subprocess
import sys

import pytest

from lockstep.locks import LockedError, locked
from tests.processes import HANG_S

# A rank that holds the lock and has a forked worker, as a DataLoader starts it; prints the worker's process id.
RANK = """
import multiprocessing, sys, threading, time
from pathlib import Path
from lockstep.locks import locked

def begin():
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    print(worker.pid, flush=True)

with locked(Path(sys.argv[1])):
    if sys.argv[2] == "thread":
        threading.Thread(target=begin).start()
    else:
        begin()
    time.sleep(900)
"""


@pytest.mark.parametrize("starter", ["main", "thread"])
def test_forked_worker_of_a_killed_rank_does_not_hold_the_lock(tmp_path, starter):
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", RANK, str(path), starter], stdout=subprocess.PIPE, text=True) as rank:
        worker = int(rank.stdout.readline())
        try:
            with pytest.raises(LockedError, match=f"process {rank.pid} on "), locked(path, wait_s=0.0):
                pytest.fail("two processes hold one lock")
            rank.kill()
            rank.wait()
            with locked(path, wait_s=HANG_S) as is_alone:  # the system may take a moment; the worker lives on
                assert is_alone
            os.kill(worker, 0)  # it lives
        finally:
            rank.kill()
            os.kill(worker, signal.SIGKILL)


def test_lock_is_free_after_the_block_and_the_file_stays(tmp_path):
    path = tmp_path / ".lock"
    for _ in range(2):
        with locked(path, wait_s=0.0) as is_alone:
            assert is_alone
    assert path.is_file()
