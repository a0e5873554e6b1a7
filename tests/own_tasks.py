"""Tasks that users might write, for tests: float64, so that a wrong factor cannot hide behind rounding."""

import os
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from lockstep import Metrics, Task


def masked_data(length, seed=0):
    """Inputs, five targets each, and a very uneven mask of valid targets (some samples have none)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, 10, generator=generator, dtype=torch.float64)
    targets = torch.randn(length, 5, generator=generator, dtype=torch.float64)
    chance = torch.rand(length, 1, generator=generator, dtype=torch.float64) ** 3
    mask = torch.rand(length, 5, generator=generator, dtype=torch.float64) < chance
    return inputs, targets, mask


class Masked(Task):
    """Regression where labels are missing unevenly: the loss is a mean over valid labels."""

    def __init__(self, length=240, dtype=torch.float64, eval_length=0, mask_all=False):
        self.length, self.dtype, self.eval_length = length, dtype, eval_length
        self.data = masked_data(length)
        if mask_all:
            self.data[2][:] = False

    def model(self):
        self.built = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5)).to(self.dtype)
        return self.built

    def train_data(self):
        inputs, targets, mask = self.data
        return TensorDataset(inputs.to(self.dtype), targets.to(self.dtype), mask)

    def eval_data(self):
        inputs, targets, mask = masked_data(self.eval_length, seed=1)
        return TensorDataset(inputs.to(self.dtype), targets.to(self.dtype), mask)

    def weight(self, batch):
        return batch[2].sum()

    def loss(self, model, batch):
        inputs, targets, mask = batch
        return ((model(inputs) - targets).square() * mask).sum()


class FewLabels(Masked):
    """Of 240 samples, three have labels, so that most global batches have none."""

    def __init__(self):
        super().__init__()
        mask = self.data[2]
        mask[:] = False
        mask[[7, 90, 201]] = True


class TwoHeads(Masked):
    """Two losses with units of their own: head `a` over valid labels, head `b` over samples; b counts three times."""

    def weight(self, batch):
        return {"a": batch[2].sum(), "b": torch.tensor(float(len(batch[0])))}

    coefficients = {"b": 3.0}  # noqa: RUF012

    def loss(self, model, batch):
        inputs, targets, mask = batch
        outputs = model(inputs)
        return {"a": ((outputs - targets).square() * mask).sum(), "b": outputs.abs().mean(dim=1).sum()}


class Plain(Masked):
    """The unit is the sample, so that no collective is needed to count."""

    def weight(self, batch):
        return None

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


class WithLengths(Masked):
    """Samples of seven lengths, by which they may be grouped."""

    def __init__(self, length=150, wrong=None, **options):
        super().__init__(length, **options)
        self.wrong = wrong

    def train_data(self):
        data = super().train_data()
        data.lengths = [1 + number * 5 % 7 for number in range(self.length)] if self.wrong is None else self.wrong
        return data


class Block(nn.Module):
    """A residual block; 7 features, which no number of ranks divides."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(7),
            nn.Linear(7, 9),
            nn.Linear(9, 7, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, hidden):
        return hidden + self.drop(self.down(self.up(self.norm(hidden)).tanh()))


class Deep(Masked):
    """Blocks between an input and a head, with a buffer; the loss calls the model and a method of its own."""

    def __init__(self, length=240, dtype=torch.float64, eval_length=0, dropout=0.0, blocks=3, frozen=()):
        super().__init__(length, dtype, eval_length)
        self.dropout, self.blocks, self.frozen = dropout, blocks, frozen

    def model(self):
        self.built = DeepModel(self.blocks, self.dropout).to(self.dtype)
        for name, parameter in self.built.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(self.frozen)))
        return self.built

    def loss(self, model, batch):
        inputs, targets, mask = batch
        return ((model.scaled(model(inputs)) - targets).square() * mask).sum()

    def predict(self, model, batch):
        return model.scaled(model(batch[0]))


class DeepModel(nn.Module):
    def __init__(self, blocks, dropout):
        super().__init__()
        self.inner, self.head = nn.Linear(10, 7), nn.Linear(7, 5)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("factors", torch.linspace(0.5, 1.5, 5), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        hidden = self.inner(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def scaled(self, outputs):
        if self.training:
            self.calls += 1
        return outputs * self.scale * self.factors


class Unused(Plain):
    """A model with a layer that the loss never touches."""

    def model(self):
        model = super().model()
        model.forgotten = nn.Linear(3, 3).to(self.dtype)
        return model

    def loss(self, model, batch):
        hidden = model[1](model[0](batch[0]))
        return (model[2](hidden) - batch[1]).square().mean(dim=1).sum()


class Failing(Plain):
    """Raises on one rank when it meets its n-th batch."""

    def __init__(self, rank, at=3, **options):
        super().__init__(**options)
        self.rank, self.at, self.calls = rank, at, 0

    def loss(self, model, batch):
        self.calls += model.training  # not those of the dry run
        if self.calls == self.at and os.environ["RANK"] == str(self.rank):
            raise ValueError("the cat sat on the cable")
        return super().loss(model, batch)


class Files(Dataset):
    """Samples as if from files, of which some cannot be read."""

    def __init__(self, length, broken=(), poisoned=()):
        self.length, self.broken, self.poisoned = length, set(broken), set(poisoned)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("truncated file")
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(10, generator=generator, dtype=torch.float64)
        targets = torch.randn(5, generator=generator, dtype=torch.float64)
        return inputs, targets * (float("nan") if index in self.poisoned else 1.0)

    def where(self, index):
        return f"folder/{index:03d}.png"


class FromFiles(Plain):
    """Reads `Files`; `seen` are the samples in the order in which they were prepared here."""

    def __init__(self, length=40, broken=(), poisoned=()):
        super().__init__(length)
        self.files = Files(length, broken, poisoned)

    def train_data(self):
        return self.files


class Dropout(Plain):
    """A model that draws random numbers in its forward pass, and data that does in its preparation."""

    def model(self):
        self.built = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 5)).to(self.dtype)
        return self.built

    def prepare(self, sample, epoch, training):
        inputs, targets, mask = sample
        return inputs + (0.1 * torch.randn(10, dtype=self.dtype) if training else 0), targets, mask


class Classes(Task):
    """Classification with metrics of several kinds of state (sums, lists, and Pearson's running moments)."""

    def __init__(self, length=30, eval_length=30):
        self.length, self.eval_length = length, eval_length

    def draw(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(length, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(inputs, torch.randint(0, 3, (length,), generator=generator))

    def model(self):
        self.built = nn.Linear(6, 3, dtype=torch.float64)
        return self.built

    def train_data(self):
        return self.draw(self.length, 0)

    def eval_data(self):
        return self.draw(self.eval_length, 1)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).softmax(dim=1)

    def metrics(self):
        from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassAUROC,
            MulticlassConfusionMatrix,
            MulticlassF1Score,
        )

        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(3, average="micro"),
                "f1": MulticlassF1Score(3),
                "auroc": MulticlassAUROC(3, thresholds=None),
                "confusion": MulticlassConfusionMatrix(3),
                "confidence": MeanMetric(),
                "correlation": PearsonCorrCoef(),
            }
        )
        return Metrics(metrics, self.update)

    def update(self, metrics, output, batch):
        best = output.max(dim=1).values
        for name in ("accuracy", "f1", "auroc", "confusion"):
            metrics[name].update(output, batch[1])
        metrics["confidence"].update(best)
        metrics["correlation"].update(best, (output.argmax(dim=1) == batch[1]).double())


# ---- tasks that are another on another rank, or in another batch


def rank():
    return int(os.environ.get("RANK", 0))


class HeadsByRank(TwoHeads):
    """Heads in another order on odd ranks; or, from the n-th batch of such a rank on, a head fewer."""

    def __init__(self, fewer_from=None, of="weight", **options):
        super().__init__(**options)
        self.fewer_from, self.of, self.calls = fewer_from, of, 0

    def weight(self, batch):
        return self._of_this_rank("weight", super().weight(batch))

    def loss(self, model, batch):
        return self._of_this_rank("loss", super().loss(model, batch))

    def _of_this_rank(self, method, heads):
        if rank() % 2 == 0:
            return heads
        self.calls += method == "weight"
        if self.of == method and self.fewer_from is not None and self.calls >= self.fewer_from:
            heads.pop("b")
        return dict(reversed(heads.items()))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 5), nn.Linear(8, 5)


class ConstantHeads(Masked):
    """Two heads with layers of their own. A head without units in a batch is the number 0, which depends on nothing."""

    def __init__(self, length=60, dtype=torch.float64, eval_length=0, constants=True, narrow=False, frozen=False):
        super().__init__(length, dtype, eval_length)
        self.constants, self.narrow, self.frozen = constants, narrow, frozen
        generator = torch.Generator().manual_seed(5)
        self.data = (*self.data[:2], torch.rand(length, 2, generator=generator) < 0.12)

    def model(self):
        self.built = TwoOutputs().to(self.dtype)
        self.built.body.requires_grad_(not self.frozen)
        return self.built

    def weight(self, batch):
        return {"first": batch[2][:, 0].sum(), "second": batch[2][:, 1].sum()}

    def loss(self, model, batch):
        inputs, targets, mask = batch
        hidden = model.body(inputs).tanh()
        losses = {}
        for number, (head, layer) in enumerate((("first", model.first), ("second", model.second))):
            if self.constants and not mask[:, number].any():
                losses[head] = torch.zeros(())
            else:
                losses[head] = ((layer(hidden) - targets).square().mean(dim=1) * mask[:, number]).sum()
                losses[head] = losses[head].bfloat16() if self.narrow else losses[head]
        return losses


class Watched(TwoHeads):
    """Head `b` is a number to look at, which depends on no parameter."""

    coefficients = {"b": 0.0}  # noqa: RUF012

    def loss(self, model, batch):
        losses = super().loss(model, batch)
        return losses | {"b": losses["b"].detach()}


class FrozenHead(ConstantHeads):
    """Where the body and the second layer are frozen, the second head depends on nothing that trains."""

    def __init__(self, **options):
        super().__init__(constants=False, **options)

    def model(self):
        model = super().model()
        model.body.requires_grad_(False)
        return model


class UnusedFrom(Plain):
    """A layer that one rank no longer uses from its n-th batch on."""

    def __init__(self, rank=1, first=5, **options):
        super().__init__(**options)
        self.rank, self.first, self.calls = rank, first, 0

    def model(self):
        model = super().model()
        model.extra = nn.Linear(10, 5).to(self.dtype)
        return model

    def loss(self, model, batch):
        self.calls += model.training  # not those of the dry run
        outputs = model[2](model[1](model[0](batch[0])))
        if rank() != self.rank or self.calls < self.first:
            outputs = outputs + model.extra(batch[0])
        return (outputs - batch[1]).square().mean(dim=1).sum()


class Returns(Plain):
    """Returns what no task should, from `loss` or `weight`."""

    def __init__(self, method, what):
        super().__init__(48)
        self.method, self.what = method, what

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if self.method != "loss":
            return loss
        odd = {
            "float": 1.5,
            "None": None,
            "tuple": (loss, loss, loss),
            "vector": loss.expand(3),
            "detached": loss.detach(),
            "int": (loss * 10).long(),
        }
        return (odd | {"empty": {}, "number": {1: loss}, "nested": {"a": {"b": loss}}, "constant": torch.zeros(())})[
            self.what
        ]

    def weight(self, batch):
        odd = {
            "text": "12",
            "vector": torch.ones(3),
            "negative": -1.0,
            "nan": float("nan"),
            "none": {"loss": None},
            "empty": {},
        }
        return odd[self.what] if self.method == "weight" else None


class Drawing(Plain):
    """Mixes samples, as mixup does, by numbers of NumPy and Python: in the loss and where a batch is made."""

    def collate(self, samples):
        inputs, targets, mask = super().collate(samples)
        share = np.random.beta(2.0, 2.0)
        return share * inputs + (1 - share) * inputs.flip(0), targets, mask

    def loss(self, model, batch):
        share = np.random.beta(0.4, 0.4) + random.random()
        return super().loss(model, (share * batch[0] + batch[0].flip(0), batch[1]))


class Normed(Plain):
    """BatchNorm over features, which cannot take a single sample; or over five places of two channels, which can."""

    def __init__(self, length=240, lengths=False, places=False, **options):
        super().__init__(length, **options)
        self.lengths, self.places = lengths, places

    def model(self):
        if self.places:
            layers = nn.Unflatten(1, (2, 5)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(10, 5)
        else:
            layers = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.built = nn.Sequential(*layers).to(self.dtype)
        return self.built

    def train_data(self):
        data = super().train_data()
        if self.lengths:
            data.lengths = [1 + number % 7 for number in range(self.length)]
        return data


class ClassesWithOutput(Classes):
    """`loss` also returns what `predict` does, in training too."""

    def loss(self, model, batch):
        logits = model(batch[0])
        return functional.cross_entropy(logits, batch[1], reduction="sum"), logits.softmax(dim=1)
