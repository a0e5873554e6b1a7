"""Tasks whose players update in turn, and the same by hand, for tests."""

import itertools

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from lockstep import AlternatingTask, Follower, Player
from lockstep.core.data.order import permute


class Points(Dataset):
    """Points in the plane, each with the noise of its own. `prepare` draws other noise in each epoch."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(length, 2, generator=generator, dtype=torch.float64) * 0.2 + 1

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return self.points[index], torch.randn(4, generator=generator, dtype=torch.float64)


def mlp(*sizes):
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


class Adversaries(AlternatingTask):
    """A generator of points against a discriminator: the losses of Goodfellow et al. 2014, non-saturating."""

    players = (Player("discriminator", "discriminator.*"), Player("generator", "generator.*"))

    def __init__(self, length=96):
        self.length = length

    def model(self):
        return nn.ModuleDict({"generator": mlp(4, 16, 2), "discriminator": mlp(2, 16, 1)})

    def train_data(self):
        return Points(self.length)

    def discriminator_loss(self, model, batch):
        real, noise = batch
        fake = model["generator"](noise).detach()
        losses = functional.softplus(-model["discriminator"](real)) + functional.softplus(model["discriminator"](fake))
        return losses.sum()

    def generator_loss(self, model, batch):
        return functional.softplus(-model["discriminator"](model["generator"](batch[1]))).sum()


class Critics(Adversaries):
    """WGAN with a gradient penalty (Gulrajani et al. 2017): the generator updates at every third step."""

    players = (Player("discriminator", ["discriminator.*"]), Player("generator", "generator.*", every=3))

    def discriminator_loss(self, model, batch):
        real, noise = batch
        with torch.enable_grad():
            fake = model["generator"](noise).detach()
            between = (0.3 * real + 0.7 * fake).requires_grad_()
            score = model["discriminator"](between).sum()
            (slope,) = torch.autograd.grad(score, between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square()
        return (model["discriminator"](fake) - model["discriminator"](real)).sum() + penalty.sum()

    def generator_loss(self, model, batch):
        return -model["discriminator"](model["generator"](batch[1])).sum()


class Taught(AlternatingTask):
    """A student that two updates of a step draw to its teacher, and a teacher that follows it."""

    players = (Player("student", ["student.*", "head.*"], updates=2),)
    followers = (Follower("teacher.", of="student.", decay=0.9),)

    def __init__(self, length=96):
        self.length = length

    def model(self):
        return nn.ModuleDict({"student": mlp(2, 16, 4), "head": mlp(4, 8, 4), "teacher": mlp(2, 16, 4)})

    def train_data(self):
        return Points(self.length)

    def weight(self, batch):
        return {"student": (batch[0][:, 0] > 1).sum()}

    def student_loss(self, model, batch):
        points, noise = batch
        with torch.no_grad():
            wanted = model["teacher"](points)
        apart = (model["head"](model["student"](points + 0.1 * noise[:, :2])) - wanted).square().sum(dim=1)
        return (apart * (points[:, 0] > 1)).sum()


def by_hand(task, steps, global_batch=24, clip_norm=None):
    """The final weights of a plain loop in one process: an optimizer for each player."""
    torch.manual_seed(0)
    model, data = task.model(), task.train_data()
    parameters = {player.name: [] for player in task.players}
    for name, parameter in model.named_parameters():
        for player in task.players:
            prefixes = [player.match] if isinstance(player.match, str) else player.match
            if any(name.startswith(prefix.removesuffix("*")) for prefix in prefixes):
                parameters[player.name].append(parameter)
    optimizers = {name: torch.optim.AdamW(own, lr=0.01, weight_decay=0.1) for name, own in parameters.items()}
    per_epoch = len(data) // global_batch
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        indices = permute(np.arange(within * global_batch, (within + 1) * global_batch), len(data), 0, epoch)
        batch = [torch.stack(parts) for parts in zip(*(data[int(index)] for index in indices), strict=True)]
        units = task.weight(batch) or {}
        for player in task.players:
            for _ in range(player.updates if (step + 1) % player.every == 0 else 0):
                model.zero_grad()
                loss = getattr(task, f"{player.name}_loss")(model, batch) / units.get(player.name, global_batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters[player.name], clip_norm or float("inf"))
                optimizers[player.name].step()
        for follower in task.followers:
            with torch.no_grad():
                for own, leader in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                    own.mul_(follower.decay).add_(leader, alpha=1 - follower.decay)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
