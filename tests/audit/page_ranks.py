"""Runs scripts under the observers on forked ranks of one process that has imported torch: a second for each script."""

import os
import socket
import time
from pathlib import Path

RANKS = 2


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def rank(number, port, script, folder, patience):
    """A rank. Never returns."""
    from lockstep.audit.__main__ import main
    from lockstep.audit.observe.recorder import recorder

    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCKSTEP_AUDIT_JUDGED_OUTSIDE": "1"}
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.chdir(Path(script).parent)
    code = 0
    try:
        main(["--folder", folder, "--patience", str(patience), script])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        recorder.end()
        os._exit(code)


def run(script, folder, patience):
    import signal

    from lockstep.audit.run import _Tails

    port, tails, left = free_port(), _Tails(Path(folder), patience), set()
    for number in range(RANKS):
        pid = os.fork()
        if not pid:
            rank(number, port, script, folder, patience)
        left.add(pid)
    while left:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if left and tails.hang(RANKS):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main(jobs):
    """For `forked.start`. A job is a script, the folder of its events, and the patience."""
    from lockstep.audit.observe import torch_private

    assert torch_private  # ranks need not import it
    for script, folder, patience in jobs:
        run(script, folder, patience)
