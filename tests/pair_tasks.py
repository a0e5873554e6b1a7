"""Tasks whose loss compares all samples of the global batch, for tests."""

from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Task
from tests.own_tasks import masked_data


class Towers(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6))
        self.right = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))


class Pairs(Task):
    """Each sample's left side belongs to its right side: the loss of CLIP, in float64."""

    def __init__(self, length=240, dropout=0.0, dtype=torch.float64):
        self.data, self.dropout, self.dtype = masked_data(length), dropout, dtype

    def model(self):
        return Towers(self.dropout).to(self.dtype)

    def train_data(self):
        return TensorDataset(*(tensor.to(self.dtype) for tensor in self.data[:2]))

    def embed(self, model, batch):
        model.calls += 1
        left, right = batch
        return {
            "left": functional.normalize(model.left(left), dim=1),
            "right": functional.normalize(model.right(right), dim=1),
        }

    def loss(self, model, embeddings):
        scores = model.scale.exp() * embeddings["left"] @ embeddings["right"].T
        own = torch.arange(len(scores), device=scores.device)
        by_row = functional.cross_entropy(scores, own, reduction="sum")
        return (by_row + functional.cross_entropy(scores.T, own, reduction="sum")) / 2


class Alike(Pairs):
    """Two losses over embeddings with labels: samples of a class are pulled together, and classes pushed apart."""

    coefficients = MappingProxyType({"apart": 0.3})

    def embed(self, model, batch):
        left, right = batch
        return functional.normalize(model.left(left), dim=1), model.right(right), right.argmax(dim=1)

    def weight(self, batch):
        return {"together": (batch[1].sum(dim=1) > 0).sum(), "apart": len(batch[1])}

    def loss(self, model, embeddings):
        left, right, labels = embeddings
        same = (labels[:, None] == labels).double()
        scores = left @ left.T * model.scale
        return {
            "together": -(scores.log_softmax(dim=1) * same).sum(),
            "apart": (right - right.mean(dim=0)).square().sum(),
        }


class OwnGenerator(Pairs):
    """Draws from a new generator each time, so that two passes over a batch differ."""

    def embed(self, model, batch):
        generator = torch.Generator()
        generator.seed()
        noise = torch.randn(batch[0].shape, generator=generator, dtype=torch.float64)
        return super().embed(model, (batch[0] + noise, batch[1]))


class NoRows(Pairs):
    def embed(self, model, batch):
        return super().embed(model, batch)["left"].sum()


class Complex(Pairs):
    def embed(self, model, batch):
        embedded = super().embed(model, batch)
        return torch.complex(embedded["left"], embedded["right"])


class NotFinite(Pairs):
    def embed(self, model, batch):
        return {name: value * float("nan") for name, value in super().embed(model, batch).items()}


class Nothing(Pairs):
    def embed(self, model, batch):
        return {}


class Unreadable(Pairs):
    """Some samples cannot be read."""

    def prepare(self, sample, epoch, training):
        if sample[0][0] > 0.8:
            raise ValueError("cannot be read")
        return sample
