"""Tasks whose data set says which samples an epoch draws, for tests; and the same training in plain torch."""

import numpy as np
import torch

from lockstep import Task
from lockstep_lab.verify.reference.order import seed_of
from tests import runs
from tests.own_tasks import masked_data

LENGTH, BATCH = 90, 24
WEIGHTS = np.where(np.arange(LENGTH) % 3 == 0, 5.0, 1.0) * (np.arange(LENGTH) % 7 != 0)
"""Every seventh sample has the weight 0."""
LABELS = np.array([number % 10 == 0 for number in range(LENGTH)], dtype=np.int64)
"""One sample in ten has the label 1."""


class Rows(torch.utils.data.Dataset):
    """Rows of tensors, with attributes."""

    def __init__(self, tensors, **attributes):
        self.tensors = tensors
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.tensors)


class EasyFirst:
    """An order of a user's own: epoch e draws the first 30 (1 + e) samples, each as often, in another order."""

    length = 60

    def __call__(self, positions, *, seed, epoch):
        return (positions * 7 + epoch) % min(30 * (1 + epoch), LENGTH)


class Sampled(Task):
    """Regression in float64, whose inputs get noise when they are prepared.

    Args:
        attributes: of the training data set, by name.
    """

    def __init__(self, noise=0.1, **attributes):
        self.noise, self.attributes, self.drawn = noise, attributes, []

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(10, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5)).double()

    def train_data(self):
        return Rows(masked_data(LENGTH)[:2], **self.attributes)

    def eval_data(self):
        return Rows(masked_data(20, seed=1)[:2], **self.attributes)

    def prepare(self, sample, epoch, training):
        inputs, targets = sample
        return inputs + self.noise * torch.randn(10, dtype=torch.float64) * training, targets

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


def settings(steps, **sections):
    return runs.config(train={"steps": steps}, **sections)


def trained(attributes, config, folder, allow_change=()):
    """Weights after a training in `folder`, for ranks."""
    return runs.fit(Sampled(**attributes), config, folder, allow_change=allow_change)[0]


def by_hand(steps, index_at, length):
    """Weights of plain torch on one process, where `index_at(epoch, position)` says which samples an epoch draws."""
    torch.manual_seed(0)
    task = Sampled()
    model, data = task.model(), task.train_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    per_epoch = -(-length // BATCH)
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        samples = []
        for position in range(within * BATCH, min((within + 1) * BATCH, length)):
            generator = torch.Generator().manual_seed(seed_of(0, epoch, position))
            inputs, targets = data[index_at(epoch, position)]
            samples.append((inputs + 0.1 * torch.randn(10, dtype=torch.float64, generator=generator), targets))
        batch = torch.utils.data.default_collate(samples)
        optimizer.zero_grad()
        (task.loss(model, batch) / len(samples)).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def by_weights(weights):
    """`index_at` of draws by weights, in plain Python: a 53-bit hash, looked up in the running sum."""
    sums = np.cumsum(weights).tolist()

    def index_at(epoch, position):
        share = (seed_of(0, epoch, 0x3E1647, position) >> 11) / 2**53 * sums[-1]
        return next(index for index, total in enumerate(sums) if share < total)

    return index_at


class Compared(Sampled):
    """Its loss depends on the order of the global batch."""

    def embed(self, model, batch):
        return {"outputs": model(batch[0]), "targets": batch[1]}

    def loss(self, model, batch):
        places = 1 + torch.arange(len(batch["outputs"]), dtype=torch.float64)
        return ((batch["outputs"] - batch["targets"]).square().mean(dim=1) * places).sum() / len(places)
