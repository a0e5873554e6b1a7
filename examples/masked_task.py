"""Labels that are missing for some samples: the unit of the loss is the valid label, and `weight` counts them.

    lockstep train examples/masked_task.py:Masked --nproc 2 train.epochs=5

With DDP by hand, each rank divides by its own number of valid labels, and the mean of these means is not the mean.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task


class Masked(Task):
    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def train_data(self):
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(2000, 10, generator=draw)
        valid = torch.rand(2000, 3, generator=draw) < torch.rand(2000, 1, generator=draw) ** 2
        return TensorDataset(inputs, inputs[:, :3].sin(), valid)

    def weight(self, batch):
        return batch[2].sum()

    def loss(self, model, batch):
        inputs, targets, valid = batch
        return ((model(inputs) - targets).square() * valid).sum()
