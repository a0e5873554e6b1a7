"""Right tasks with unusual models, as users write them: `lockstep verify` must find no fault in them."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep import Task


def points(count, *, seed=0, classes=4, features=12):
    """Points around a centre for each class, and their class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(99)) * 1.5
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + torch.randn(count, features, generator=generator), labels


class _Classifier(Task):
    """Four classes, cross-entropy and accuracy."""

    overrides = {}  # noqa: RUF012

    def __init__(self):
        self.train, self.held_out = TensorDataset(*points(400)), TensorDataset(*points(130, seed=1))

    def model(self):
        return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))

    def train_data(self):
        return self.train

    def eval_data(self):
        return self.held_out

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).softmax(dim=-1)

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(4, average="micro")})


class WeightNorm(_Classifier):
    def model(self):
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(12, 24)),
            nn.ReLU(),
            parametrizations.weight_norm(nn.Linear(24, 4)),
        )


class SpectralNorm(_Classifier):
    """The vectors of the power iteration move in each forward pass in training mode."""

    def model(self):
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 24)), nn.ReLU(), nn.Linear(24, 4))


class Orthogonal(_Classifier):
    """A matrix that stays orthogonal by a parametrization."""

    def model(self):
        return nn.Sequential(parametrizations.orthogonal(nn.Linear(12, 12)), nn.GELU(), nn.Linear(12, 4))


class MixtureOfExperts(_Classifier):
    """Each sample goes to two of three experts, and a penalty balances them by the mean over the batch's samples.

    The penalty is a sum over samples: each sample's largest gate.
    """

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(12, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3)
            )

        def forward(self, inputs):
            gates, chosen = self.gate(inputs).softmax(-1).topk(2, dim=-1)
            outputs = inputs.new_zeros(len(inputs), 4)
            for number, expert in enumerate(self.experts):
                rows, places = (chosen == number).nonzero(as_tuple=True)
                outputs = outputs.index_add(0, rows, expert(inputs[rows]) * gates[rows, places, None])
            return outputs, gates

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        outputs, gates = model(batch[0])
        return functional.cross_entropy(outputs, batch[1], reduction="sum") + 0.01 * gates.square().sum()

    def predict(self, model, batch):
        return model(batch[0])[0].softmax(dim=-1)


class Lora(_Classifier):
    """A frozen network with low-rank additions, of which one factor begins at zero."""

    overrides = {"optim.lr": "0.02"}  # noqa: RUF012

    class Adapted(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.base = nn.Linear(inputs, outputs).requires_grad_(False)
            self.down = nn.Parameter(torch.randn(4, inputs) / inputs**0.5)
            self.up = nn.Parameter(torch.zeros(outputs, 4))

        def forward(self, inputs):
            return self.base(inputs) + inputs @ self.down.T @ self.up.T

    def model(self):
        return nn.Sequential(self.Adapted(12, 48), nn.ReLU(), self.Adapted(48, 48), nn.ReLU(), nn.Linear(48, 4))


class PartlyFrozen(_Classifier):
    """The first layers never train, and stay in evaluation mode with their BatchNorm."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
            self.head = nn.Linear(32, 4)

        def train(self, mode=True):
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, inputs):
            return self.head(self.body(inputs))

    def model(self):
        return self.Net()


class ComplexWeights(_Classifier):
    """A filter with complex weights in the frequencies of the inputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(8, 7, dtype=torch.complex64) / 3)
            self.head = nn.Linear(96, 4)

        def forward(self, inputs):
            spectrum = torch.fft.rfft(inputs)
            waves = torch.fft.irfft(spectrum.unsqueeze(1) * self.filter, n=12)
            return self.head(waves.flatten(1).relu())

    def model(self):
        return self.Net()


class PackedRecurrent(_Classifier):
    """A GRU over packed sequences of different lengths."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, inputs, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][-1])

    def __init__(self):
        super().__init__()
        self.train, self.held_out = (self._with_lengths(data) for data in (self.train, self.held_out))

    def _with_lengths(self, data):
        inputs, labels = data.tensors
        return TensorDataset(inputs.view(-1, 4, 3), torch.arange(len(labels)) % 2 + 3, labels)

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0], batch[1]).softmax(dim=-1)

    def metrics(self):
        return None


class AverageInside(_Classifier):
    """The model keeps a moving average of its own weights as buffers, and evaluates with them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("average", self.layer.weight.detach().clone())

        def forward(self, inputs):
            if self.training:
                with torch.no_grad():
                    self.average.mul_(0.9).add_(self.layer.weight, alpha=0.1)
                return self.layer(inputs)
            return functional.linear(inputs, self.average, self.layer.bias)

    def model(self):
        return self.Net()


class DropoutInEvaluation(_Classifier):
    """Monte-Carlo dropout: predictions are random too."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 4)

        def forward(self, inputs):
            return self.last(functional.dropout(self.first(inputs).relu(), 0.1, training=True))

    def model(self):
        return self.Net()


class StochasticDepth(_Classifier):
    """Branches are skipped at random, by Python's generator."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(12, 24), nn.Linear(24, 4)
            self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

        def forward(self, inputs):
            hidden = self.stem(inputs)
            for block in self.blocks:
                keep = not self.training or random.random() > 0.2
                hidden = hidden + block(hidden).relu() * float(keep)
            return self.head(hidden)

    def model(self):
        return self.Net()


class BagOfWords(_Classifier):
    """Sums of embeddings, of which some rows are used in no batch."""

    overrides = {"optim.lr": "0.03"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(50, 16, mode="sum"), nn.Linear(16, 4)

        def forward(self, tokens):
            return self.head(self.words(tokens))

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(4, (500,), generator=generator)
        tokens = torch.randint(12, (500, 6), generator=generator) + 12 * labels[:, None]
        self.train, self.held_out = TensorDataset(tokens[:400], labels[:400]), TensorDataset(tokens[400:], labels[400:])

    def model(self):
        return self.Net()


class LanguageModel(Task):
    """The next token, with the embedding tied to the output layer; every sequence repeats a pattern."""

    overrides = {"optim.lr": "0.01"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places = nn.Embedding(11, 16), nn.Embedding(12, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
            self.head = nn.Linear(16, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            length = tokens.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.embed.weight.dtype)
            hidden = self.embed(tokens) + self.places.weight[:length]
            return self.head(self.layer(hidden, src_mask=mask, is_causal=True))

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        begins = torch.randint(11, (420, 1), generator=generator)
        self.tokens = (begins + 3 * torch.arange(12)) % 11

    def model(self):
        return self.Net()

    def train_data(self):
        return TensorDataset(self.tokens[:360])

    def eval_data(self):
        return TensorDataset(self.tokens[360:])

    def weight(self, batch):
        return batch[0][:, 1:].numel()

    def loss(self, model, batch):
        (tokens,) = batch
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    def predict(self, model, batch):
        return model(batch[0][:, :-1]).argmax(-1)


class GradientReversal(_Classifier):
    """Adversarial training: the gradient of a second classifier is reversed before the features."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.view_as(inputs)

        @staticmethod
        def backward(ctx, gradient):
            return -0.1 * gradient

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
            self.classes, self.domains = nn.Linear(24, 4), nn.Linear(24, 2)

        def forward(self, inputs):
            features = self.features(inputs)
            return self.classes(features), self.domains(GradientReversal.Reverse.apply(features))

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        classes, domains = model(batch[0])
        domain = (batch[0][:, 0] > 0).long()
        return functional.cross_entropy(classes, batch[1], reduction="sum") + functional.cross_entropy(
            domains, domain, reduction="sum"
        )

    def predict(self, model, batch):
        return model(batch[0])[0].softmax(dim=-1)


class StraightThrough(_Classifier):
    """Binary activations, with the gradient of the identity; a code book of vectors."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 4)

        def forward(self, inputs):
            hidden = self.first(inputs).tanh()
            return self.last(hidden + (hidden.sign() - hidden).detach())

    def model(self):
        return self.Net()


class Checkpointed(_Classifier):
    """Activations of a block with dropout are computed again in the backward pass."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(24, 4)

        def forward(self, inputs):
            return self.last(checkpoint(self.first, inputs, use_reentrant=False))

    def model(self):
        return self.Net()


class UnusedByDesign(_Classifier):
    """A branch is used for some batches only: with `find_unused_parameters`."""

    overrides = {"parallel.find_unused_parameters": "true"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.extra, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 4)

        def forward(self, inputs):
            hidden = self.first(inputs).relu()
            rows = (inputs[:, 0] > 2.5).nonzero().flatten()
            if len(rows):
                hidden = hidden.index_add(0, rows, self.extra(hidden[rows]).relu())
            return self.last(hidden)

    def model(self):
        return self.Net()


class InstanceNorm(_Classifier):
    """Convolutions with instance and group normalisation, and a pooling over the places."""

    def model(self):
        return nn.Sequential(
            nn.Unflatten(1, (1, 12)),
            nn.Conv1d(1, 8, 3, padding=1),
            nn.InstanceNorm1d(8, affine=True),
            nn.ReLU(),
            nn.Conv1d(8, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(96, 4),
        )


class BatchNormMomentumNone(_Classifier):
    """BatchNorm that averages over all batches."""

    def model(self):
        return nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24, momentum=None), nn.ReLU(), nn.BatchNorm1d(24), nn.Linear(24, 4)
        )


class LazyModel(_Classifier):
    """Sizes of layers are found by a first forward pass in `model`."""

    def model(self):
        model = nn.Sequential(nn.LazyLinear(24), nn.ReLU(), nn.LazyLinear(4))
        with torch.no_grad():
            model(torch.zeros(1, 12))
        return model


class DoublePrecision(_Classifier):
    """A model and data in float64."""

    def __init__(self):
        self.train, self.held_out = (
            TensorDataset(data[0].double(), data[1]) for data in (points(400), points(130, seed=1))
        )

    def model(self):
        return super().model().double()


class FixedNoise(_Classifier):
    """A constructor that draws a random projection with NumPy, and keeps it as a buffer that no checkpoint holds."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            projection = np.random.default_rng(0).standard_normal((12, 40)).astype("float32")
            self.register_buffer("projection", torch.from_numpy(projection) / 4, persistent=False)
            self.head = nn.Linear(80, 4)

        def forward(self, inputs):
            waves = inputs @ self.projection
            return self.head(torch.cat([waves.sin(), waves.cos()], dim=1))

    def model(self):
        return self.Net()
