"""Digits with your own optimizer and schedule: Lion (Chen et al. 2023, arXiv:2302.06675).

lockstep train examples/lion_task.py:Digits --nproc 2 train.epochs=5 train.eval_every_epochs=1
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep
from lockstep_recipes.recipes.digits import Digits as Images


class Lion(torch.optim.Optimizer):
    """The sign of an average of gradients."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - first).sign(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - second)


class Digits(lockstep.Task):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_data(self):
        data = Images(training=True)
        return TensorDataset(data.images / 255, torch.from_numpy(data.labels))

    def eval_data(self):
        data = Images(training=False)
        return TensorDataset(data.images / 255, torch.from_numpy(data.labels))

    def loss(self, model, batch):
        images, labels = batch
        return cross_entropy(model(images), labels, reduction="sum")

    def optimizer(self, groups):
        return Lion(groups, lr=3e-3)

    def schedule(self, update):
        return min(1.0, (update + 1) / 20) * 0.99 ** (update / 2)
