"""A task of a machine that lies once: of two ranks, the second flips a bit of a weight after some steps."""

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import own_tasks
from tests.watch.faults import faulty

_kept = contextlib.ExitStack()


class Lying(own_tasks.Deep):
    def model(self):
        if os.environ.get("WORLD_SIZE") == "2" and os.environ["RANK"] == "1" and not _kept._exit_callbacks:
            _kept.enter_context(faulty("weight", after=9, times=1))
        return super().model()
