"""What ranks run that the agent starts in a test. Nothing else but heartbeats is imported with it."""

import os
import signal
import sys
import time
from pathlib import Path

from lockstep.core.parallel import heartbeat


def abort_on_rank_1(said):
    """The main function of a rank. On rank 1 a GPU asserts, and a thread of NCCL says so and ends the process."""
    if os.environ["RANK"] == "1":
        os.write(2, said.encode())
        os.abort()
    signal.pause()


def end_early_on_rank_1(folder):
    """The main function of a rank. Ranks 0 and 2 end well. Then rank 1 ends as a library may end a process."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        while not all(heartbeat.has_ended(Path(folder), other) for other in (0, 2)):
            time.sleep(0.01)
        os._exit(0)
    if rank == 2:
        sys.exit(0)  # as the command line does


def leave_a_process_behind_on_rank_1(folder):
    """The main function of a rank. Rank 1 is killed, and a process that it has forked runs on, as a loader worker."""
    if os.environ["RANK"] == "1":
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(folder, "left").write_text(str(os.getpid()))
            while True:
                signal.pause()
        while not Path(folder, "left").exists() or not Path(folder, "left").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
