"""The task: model, data and loss, with no distributed code."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task
from waves.options import WavesOptions


class Waves(Task):
    def __init__(self, options: WavesOptions):
        self.options = options

    def model(self):
        width = self.options.width
        return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def train_data(self):
        x = torch.linspace(-1, 1, 1024).unsqueeze(1)
        return TensorDataset(x, torch.sin(math.pi * self.options.cycles * x))

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().sum()
