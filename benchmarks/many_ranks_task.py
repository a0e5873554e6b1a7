"""The task for `many_ranks.py`: a model of a few parameters, and marks when a rank is where."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Part, Task
from lockstep.core.parallel import rendezvous

SAVES_AFTER = 5  # steps


def mark(name, value=0.0):
    """Append a line to the file that the environment names; a line so short is written whole."""
    words = (time.time(), time.process_time(), os.environ["RANK"], os.getpid(), name, value)
    with open(os.environ["MARKS"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


class Tiny(Task):
    def __init__(self, samples: int = 1024) -> None:
        self.samples = samples
        mark("imported")

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.samples, 8, generator=generator)
        return TensorDataset(inputs, inputs.tanh())

    def model(self):
        mark("model")
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(8, 8))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


class Marks(Part):
    """Marks the first steps and the save, then makes steps rare: the processes wait to be looked at."""

    def __init__(self) -> None:
        self.steps = 0

    def start(self, training):
        mark("ready")

    def after_step(self, training):
        self.steps += 1
        if self.steps <= SAVES_AFTER:
            mark(f"step-{self.steps}")
        elif self.steps == SAVES_AFTER + 2:
            if training.rank == 0:
                mark("keys", next(iter(rendezvous._stores.values()))[0].num_keys())
            mark("resting")
        else:
            time.sleep(0.5)

    def before_save(self, training):
        if self.steps == SAVES_AFTER:
            mark("saves")
