"""Silent data corruption, for docs/watch.md: lockstep train examples/lying_device.py:Regression watch.every=10

The second rank computes one bit of the hidden layer wrongly, from its 30th pass on. The task itself is correct.
"""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Wrong:
    """Flips a bit of the first number in a module's output."""

    def __init__(self, after):
        self.after, self.passes = after, 0

    def __call__(self, module, inputs, output):
        self.passes += torch.is_grad_enabled()
        if self.passes <= self.after or not torch.is_grad_enabled():
            return None
        flipped = output.detach().clone()
        flipped.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 18)
        return output + (flipped - output.detach())


class Regression(lockstep.Task):
    def model(self):
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        if os.environ.get("RANK") == "1":
            model[0].register_forward_hook(Wrong(after=30))
        return model

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(240, 10, generator=generator)
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()
