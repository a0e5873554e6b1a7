"""Wrong tasks, each next to a right one of `unusual_kinds`."""

import torch
from torch import nn
from torch.nn import functional

from packages.lab.tests.verify.unusual_kinds import (
    BalancedExperts,
    CausalTokens,
    Denoised,
    StronglyAugmented,
    Variational,
)
from packages.lab.tests.verify.unusual_models import _Classifier


class BlindDenoised(Denoised):
    """The network never sees its input."""

    class Net(Denoised.Net):
        def forward(self, inputs, times):
            return super().forward(torch.zeros_like(inputs), times)


class MeanDivergence(Variational):
    """The divergence is a mean inside of a sum."""

    coefficients = {}  # noqa: RUF012

    def loss(self, model, batch):
        outputs, *latents = model(batch[0])
        return (outputs - batch[0]).square().sum() + self.divergences(*latents).mean()


class BalanceOncePerBatch(BalancedExperts):
    """The balance counts once per micro-batch, whatever its size."""

    def loss(self, model, batch):
        heads = super().loss(model, batch)
        return heads["classes"] + 0.5 * model.balance


class StatisticsInEvaluation(_Classifier):
    """Outputs are normalised over the batch, in evaluations, too."""

    class Net(nn.Sequential):
        def forward(self, inputs):
            hidden = self[0](inputs)
            return self[1]((hidden - hidden.mean(0)).relu())

    def model(self):
        return self.Net(nn.Linear(12, 24), nn.Linear(24, 4))


class NoMask(CausalTokens):
    """The decoder has no causal mask."""

    is_causal = False


class NoMaskInsideTheLoss(NoMask):
    """The same; the loss shifts the tokens."""

    def prepare(self, sample, epoch, training):
        return sample[0]

    def weight(self, batch):
        return batch[:, 1:].numel()

    def loss(self, model, batch):
        outputs = model(batch[:, :-1]).transpose(1, 2)
        return functional.cross_entropy(outputs, batch[:, 1:], reduction="sum")


class DropsInPrediction(_Classifier):
    """A dropout function without `training`, which is then always on."""

    class Net(nn.Sequential):
        def forward(self, inputs):
            return self[1](functional.dropout(self[0](inputs).relu(), 0.3))

    def model(self):
        return self.Net(nn.Linear(12, 24), nn.Linear(24, 4))


class PredictsInTraining(_Classifier):
    """Predictions are made in training mode."""

    def model(self):
        return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))

    def predict(self, model, batch):
        return model.train()(batch[0]).softmax(-1)


class OtherScale(StronglyAugmented):
    """Evaluation inputs are not normalised."""

    def prepare(self, sample, epoch, training):
        return super().prepare(sample, epoch, True) if training else (20 * sample[0] + 100, sample[1])


class OtherDeviation(StronglyAugmented):
    """Evaluation inputs are divided by a different number."""

    def prepare(self, sample, epoch, training):
        inputs, label = super().prepare(sample, epoch, training)
        return (inputs if training else inputs / 3), label


class MeanOverHidden(_Classifier):
    """The hidden features of a sample are predicted, and the loss is a mean over those of the micro-batch."""

    def model(self):
        return nn.Linear(12, 12)

    def loss(self, model, batch):
        features = batch[0]
        hidden = torch.rand(features.shape) < torch.rand(len(features), 1)
        hidden[:, 0] = True
        wrong = (model(features.masked_fill(hidden, 0.0)) - features).square()
        return len(features) * (wrong * hidden).sum() / hidden.sum()

    def metrics(self):
        return {}


class NormalisedInCollate(_Classifier):
    """Features are normalised by the statistics of the micro-batch."""

    def collate(self, samples):
        features, classes = map(torch.stack, zip(*samples, strict=True))
        return (features - features.mean(dim=0)) / features.std(dim=0).clamp_min(1e-3), classes


class Transposed(nn.Module):
    """A module over (samples, positions, features) instead of (samples, features, positions), with padding."""

    def __init__(self, inner, padding):
        super().__init__()
        self.inner, self.padding = inner, padding

    def forward(self, states):
        return self.inner(functional.pad(states.transpose(1, 2), self.padding)).transpose(1, 2)


class SeesNextState(_Classifier):
    """A convolution over time reads the state that it predicts."""

    padding = (1, 1)

    def model(self):
        return Transposed(nn.Conv1d(2, 2, 3), self.padding)

    def prepare(self, sample, epoch, training):
        states = sample[0].reshape(6, 2)
        return {"past": states[:-1], "next": states[1:]}

    def loss(self, model, batch):
        return (model(batch["past"]) - batch["next"]).square().sum()

    def predict(self, model, batch):
        return model(batch["past"])

    def metrics(self):
        return {}


class SeesPastStates(SeesNextState):
    """The right neighbour: padding only before the first state."""

    padding = (2, 0)


class WritesIntoBatch(_Classifier):
    """The loss adds noise to the batch itself, which the metrics then see."""

    def loss(self, model, batch):
        batch[0].add_(0.5)
        return super().loss(model, batch)


class PredictsIntoBatch(_Classifier):
    def predict(self, model, batch):
        batch[0][:, 0] = 0.0
        return super().predict(model, batch)
