"""A small task whose steps take a given time. For `nodes.py`."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task


class Slow(Task):
    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def train_data(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(400, 10, generator=generator)
        return TensorDataset(inputs, inputs[:, :5].tanh())

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 5))

    def loss(self, model, batch):
        if model.training:
            time.sleep(self.step_s)
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()
