"""Right tasks with parameters that no optimizer updates."""

import torch
from torch import nn

from tests import own_tasks


class Follower(nn.Module):
    """A frozen copy of a trained layer, which follows it in each forward pass."""

    def __init__(self):
        super().__init__()
        self.linear, self.teacher = nn.Linear(10, 5).double(), nn.Linear(10, 5).double().requires_grad_(False)
        self.teacher.load_state_dict(self.linear.state_dict())

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                for one, other in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
                    one.lerp_(other, 0.1)
        return self.linear(inputs) + 0.1 * self.teacher(inputs)


class Indexed(nn.Module):
    """Frozen parameters that are no fractions: a mask and an order."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5).double()
        self.mask = nn.Parameter(torch.arange(10) % 2 == 0, requires_grad=False)
        self.order = nn.Parameter(torch.arange(10).flip(0), requires_grad=False)

    def forward(self, inputs):
        return self.linear(inputs[:, self.order] * self.mask)


class Clamped(nn.Module):
    """A trained weight that each forward pass keeps within a range."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5).double()

    def forward(self, inputs):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return self.linear(inputs)


class FollowerTask(own_tasks.Plain):
    def model(self):
        return Follower()


class IndexedTask(own_tasks.Plain):
    def model(self):
        return Indexed()


class ClampedTask(own_tasks.Plain):
    def model(self):
        return Clamped()
