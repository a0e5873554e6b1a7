"""The task for `restart.py`: the same model, data and marks as in `restart_plain.py`."""

import threading

from restart_plain import digits, mark, network, started
from torch import nn

from lockstep import Task


class Marked(Task):
    def __init__(self):
        mark("started", started())
        # Lockstep starts this thread right before the process group is made: imports are done, the store is reached.
        threads = [thread.native_id for thread in threading.enumerate() if thread.name == "lockstep-failures"]
        mark("imported", started(*threads))
        mark("joined")

    def train_data(self):
        return digits()

    def model(self):
        mark("model")
        return network()

    def loss(self, model, batch):
        mark("loss")
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
