"""Small tasks whose result depends on the number of ranks, each for one reason, and two that are right."""

import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Task


class Network(nn.Module):
    """Dropout, running statistics and a buffer that counts forward passes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), nn.Linear(13, 3))

    def forward(self, inputs):
        return self.layers(inputs)


class Right(Task):
    def model(self):
        return Network()

    def train_data(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(120, 6, generator=generator)
        return TensorDataset(inputs, torch.randint(3, (120,), generator=generator))

    def eval_data(self):
        return self.train_data()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class ReadsRank(Right):
    def loss(self, model, batch):
        factor = 1 + 0.1 * int(os.environ["RANK"])
        return factor * super().loss(model, batch)


class Counting(Network):
    """Its outputs grow with each call, by a number that is no buffer."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) * (1 + 0.01 * self.calls)


class Counts(Right):
    def model(self):
        return Counting()


class OwnGenerator(Right):
    """Adds noise to a batch from its own generator, which the engine seeds."""

    def __init__(self):
        self.noise = np.random.default_rng(3)

    def loss(self, model, batch):
        inputs, label = batch
        noise = 0.1 * torch.from_numpy(self.noise.normal(size=inputs.shape)).float()
        return super().loss(model, (inputs + noise, label))


class Unseeded(Right):
    def prepare(self, sample, epoch, training):
        inputs, label = sample
        return inputs + torch.from_numpy(np.random.default_rng().normal(size=6)).float(), label
