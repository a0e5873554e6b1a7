"""Tasks that are right, each awkward in a way of its own: what `lockstep verify` must not complain of."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from lockstep import Presenter, Task


def clusters(count, classes=4, seed=0, chances=None):
    """Points around one centre per class, and their class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 12, generator=torch.Generator().manual_seed(99)) * 1.5
    chances = torch.tensor(chances or (1.0,) * classes)
    labels = torch.multinomial(chances, count, replacement=True, generator=generator)
    return centres[labels] + torch.randn(count, 12, generator=generator), labels


class ShowsClass(Presenter):
    def describe(self, output):
        return {"prediction": int(output.argmax()), "probability": round(float(output.max()), 3)}

    def truth(self, sample):
        return int(sample[1])


class Base(Task):
    """Four classes, an MLP, cross-entropy, accuracy."""

    presenter = ShowsClass

    chances = None

    def net(self):
        return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))

    def model(self):
        return self.net()

    def train_data(self):
        return TensorDataset(*clusters(400, chances=self.chances))

    def eval_data(self):
        return TensorDataset(*clusters(130, seed=1, chances=self.chances))

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).float().softmax(dim=-1)

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        return MetricCollection(
            {"accuracy": MulticlassAccuracy(4, average="micro"), "f1": MulticlassF1Score(4, average="macro")}
        )


class BatchNorm(Base):
    """Batch statistics, which depend on how a batch is cut."""

    def net(self):
        return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))


class Dropout(Base):
    """Dropout as a module and as a function, and stochastic depth by an attribute of another name."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.second, self.last = (
                nn.Linear(12, 24),
                nn.Dropout(0.2),
                nn.Linear(24, 24),
                nn.Linear(24, 4),
            )
            self.drop_prob = 0.1

        def forward(self, inputs):
            hidden = self.drop(self.first(inputs).relu())
            hidden = functional.dropout(hidden, 0.1, self.training)
            branch = self.second(hidden).relu()
            if self.training and self.drop_prob > 0:
                branch = branch * (torch.rand(len(branch), 1) > self.drop_prob)
            return self.last(hidden + branch)

    def net(self):
        return self.Net()


class Attention(Base):
    """A transformer layer with dropout in its attention, over a sequence of three."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 16, dropout=0.1, batch_first=True)
            self.head = nn.Linear(12, 4)

        def forward(self, inputs):
            return self.head(self.layer(inputs.view(-1, 3, 4)).flatten(1))

    def net(self):
        return self.Net()


class Recurrent(Base):
    """An LSTM of two layers with dropout between them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 12, 2, dropout=0.2, batch_first=True), nn.Linear(12, 4)

        def forward(self, inputs):
            return self.head(self.lstm(inputs.view(-1, 3, 4))[0][:, -1])

    def net(self):
        return self.Net()


class Words(Dataset):
    """Sequences of tokens of very different lengths; the class is the most frequent token."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        self.lengths = generator.integers(3, 40, count)
        self.items = []
        for length in self.lengths:
            label = int(generator.integers(4))
            tokens = generator.integers(1, 9, length)
            tokens[: (length + 1) // 2] = label + 1
            self.items.append((generator.permutation(tokens), label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Tokens(Base):
    """Padding in collate, lengths that group similar samples, embeddings that a batch uses in part, and workers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 16, padding_idx=0), nn.Linear(16, 4)

        def forward(self, tokens):
            present = (tokens > 0).unsqueeze(-1)
            return self.head((self.embed(tokens) * present).sum(1) / present.sum(1))

    def net(self):
        return self.Net()

    def train_data(self):
        return Words(300, 0)

    def eval_data(self):
        return Words(90, 1)

    def collate(self, samples):
        rows = [torch.as_tensor(tokens) for tokens, _ in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in samples])


class Rare(Base):
    """One class in ten samples out of a hundred each, so that the most frequent one is a good guess."""

    chances = (0.85, 0.05, 0.05, 0.05)


class Augmented(Base):
    """Random changes to every sample, by all three generators."""

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        if training:
            import random

            inputs = inputs + 0.1 * torch.randn(12) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return inputs, label


class ShowsRisks(Presenter):
    def describe(self, output):
        return {"risk": [round(value, 3) for value in output.tolist()]}

    def truth(self, sample):
        return sample[1].tolist()


class Horizons(Base):
    """Several heads of masked labels, unevenly valid, one with a weight of its own; a loss in float32; no metric."""

    presenter = ShowsRisks

    def model(self):
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))

    def train_data(self):
        return self._data(360, 0)

    def eval_data(self):
        return self._data(100, 1)

    def _data(self, count, seed):
        inputs, _ = clusters(count, seed=seed)
        generator = torch.Generator().manual_seed(seed + 50)
        risk = inputs @ torch.randn(12, 6, generator=torch.Generator().manual_seed(7))
        labels = (risk > 0).float()
        valid = torch.rand(count, 6, generator=generator) < torch.rand(count, 1, generator=generator) ** 2
        return TensorDataset(inputs, labels, valid.float())

    def weight(self, batch):
        return {"near": batch[2][:, :3].sum(), "far": batch[2][:, 3:].sum()}

    coefficients = {"far": 0.5}  # noqa: RUF012

    def loss(self, model, batch):
        losses = (
            functional.binary_cross_entropy_with_logits(model(batch[0]).float(), batch[1].float(), reduction="none")
            * batch[2].float()
        )
        return {"near": losses[:, :3].sum(), "far": losses[:, 3:].sum()}

    def metrics(self):
        return None

    def predict(self, model, batch):
        return model(batch[0]).sigmoid()


class Blocks(Base):
    """Residual blocks with LayerNorm, tied weights, a frozen layer, and a branch that begins at zero."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(12, 16).requires_grad_(False)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(3)
            )
            for block in self.blocks:
                nn.init.zeros_(block[3].weight)
            self.blocks[2][1].weight = self.blocks[1][1].weight
            self.head = nn.Linear(16, 4)

        def forward(self, inputs):
            hidden = self.stem(inputs)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return self.head(hidden)

    def net(self):
        return self.Net()


class Smoothed(Base):
    """Label smoothing, so that no output has a loss near zero; a buffer that counts forward passes; dtype questions."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
            self.register_buffer("passes", torch.zeros((), dtype=torch.long))

        def forward(self, inputs):
            if self.training:
                self.passes += 1
            return self.layers(inputs)

    def net(self):
        return self.Net()

    def loss(self, model, batch):
        dtype = next(model.parameters()).dtype
        return functional.cross_entropy(model(batch[0].to(dtype)), batch[1], reduction="sum", label_smoothing=0.2)

    def predict(self, model, batch):
        return model(batch[0].to(next(model.parameters()).dtype)).float().softmax(dim=-1)


class NoEvaluation(Base):
    """Nothing to evaluate on, and nothing to predict."""

    def eval_data(self):
        return None

    def predict(self, model, batch):
        return super(Base, self).predict(model, batch)

    def metrics(self):
        return None
