"""Small tasks that are odd or wrong in one way each, for the tests of single parts of `lockstep verify`."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Task


class Small(Task):
    """Regression on 40 samples of three numbers, in float32."""

    length = 40

    def model(self):
        return nn.Linear(3, 2)

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(self.length, 3, generator=generator), torch.randn(self.length, 2, generator=generator)
        )

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()


class ConvertsItself(Small):
    """The forward pass puts the weights into float32, as routers of some mixtures of experts do."""

    def loss(self, model, batch):
        outputs = model.to(torch.float32)(batch[0].float())
        return (outputs - batch[1]).square().sum()


class Noisy(Small):
    """Noise on the weights' outputs, in another way than by dropout."""

    def loss(self, model, batch):
        outputs = model(batch[0])
        return (outputs + 0.1 * torch.randn_like(outputs) - batch[1]).square().sum() + 0.0 * torch.bernoulli(
            torch.full((1,), 0.5)
        ).sum()


class PythonsRandom(Small):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + random.random())


class NumpysRandom(Small):
    def loss(self, model, batch):
        return super().loss(model, batch) * float(1 + np.random.rand())


class SeededBySample(Small):
    """Each sample seeds torch with a number of its own."""

    def prepare(self, sample, epoch, training):
        torch.manual_seed(int(1000 * float(sample[0].abs().sum())))
        return sample[0] + torch.randn(3), sample[1]


class Attention(Small):
    """Attention without dropout, which draws nothing."""

    def model(self):
        return nn.Sequential(
            nn.Unflatten(1, (3, 1)),
            nn.TransformerEncoderLayer(1, 1, 2, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(3, 2),
        )


class Mean(Small):
    """A mean where a sum is asked for."""

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()


class MeanOfHeads(Small):
    """The same, in one of two heads that weigh alike."""

    def loss(self, model, batch):
        outputs = model(batch[0]) - batch[1]
        return {"a": outputs.square().mean(), "b": outputs.abs().mean()}

    def weight(self, batch):
        return {"a": len(batch[0]), "b": len(batch[0])}


class Odd(Mean):
    """A mean over batches of seven, which have no halves of one size."""

    length = 7


class MeanOfOneHead(Small):
    """A mean over valid labels, of which one half of a batch has more, beside a sum that is much larger."""

    def train_data(self):
        inputs, targets = super().train_data().tensors
        return TensorDataset(inputs, targets, torch.arange(self.length) % 3 == 0)

    def weight(self, batch):
        return {"b": len(batch[0]), "a": batch[2].sum()}

    def loss(self, model, batch):
        squares = (model(batch[0]) - batch[1]).square().sum(dim=1)
        return {"a": (squares * batch[2]).sum() / batch[2].sum().clamp(min=1), "b": 1000 * squares.sum()}


class MaskedMean(MeanOfOneHead):
    """The same, alone."""

    def weight(self, batch):
        return batch[2].sum()

    def loss(self, model, batch):
        return super().loss(model, batch)["a"]


class MeanOverSamples(MeanOfOneHead):
    """A mean over all samples of what is masked, where valid labels are counted."""

    def weight(self, batch):
        return {"a": batch[2].sum(), "b": batch[2].sum()}

    def loss(self, model, batch):
        squares = (model(batch[0]) - batch[1]).square().sum(dim=1) * batch[2]
        return {"a": squares.sum(), "b": squares.mean()}


class MixedByNumpy(Small):
    """Every sample of a batch is mixed with its neighbour, by a share that NumPy draws."""

    def share(self):
        return np.random.beta(1, 1)

    def collate(self, samples):
        share = self.share()
        inputs, targets = super().collate(samples)
        return share * inputs + (1 - share) * inputs.roll(1, 0), share * targets + (1 - share) * targets.roll(1, 0)


class MixedByTorch(MixedByNumpy):
    def share(self):
        return float(torch.rand(()))


class Coupled(Small):
    """Samples of a batch see each other."""

    def loss(self, model, batch):
        outputs = model(batch[0])
        return (outputs - outputs.mean(0) - batch[1]).square().sum()


class CoupledInModel(Small):
    """The model centres its outputs over the batch, and nothing but inputs is in a batch."""

    class Centred(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs - outputs.mean(0)

    def model(self):
        return self.Centred(3, 2)

    def train_data(self):
        return TensorDataset(super().train_data().tensors[0])

    def loss(self, model, batch):
        return (model(batch[0]) - batch[0][:, :2]).square().sum()


class CountsPasses(Small):
    """The model counts its passes in an attribute, and its result depends on it."""

    class Counts(nn.Linear):
        passes = 0

        def forward(self, inputs):
            self.passes += 1
            return super().forward(inputs) * (1 + self.passes)

    def model(self):
        return self.Counts(3, 2)


class Single(Small):
    """One sample, which has no halves."""

    length = 1


class Normed(Small):
    def model(self):
        return nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        )


class Unfixable(Small):
    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))


class OnlySingle(Small):
    """Insists on float32."""

    def loss(self, model, batch):
        inputs = batch[0]
        if inputs.dtype != torch.float32:
            raise TypeError("inputs must be float32\nand nothing else")
        return super().loss(model, batch)


class CastsInside(Small):
    """Casts inside, so that a model in float64 does not fit."""

    def loss(self, model, batch):
        return (model(batch[0].float()) - batch[1].float()).square().sum()


class Bf16(Small):
    """A model and a loss in bfloat16 that cannot be had in float64."""

    def model(self):
        return super().model().bfloat16()

    def loss(self, model, batch):
        return (model(batch[0].bfloat16()) - batch[1].bfloat16()).square().sum()


class Bf16Heads(Bf16):
    """Two of them."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return {"a": loss, "b": 2 * loss}


class Unreadable(Small):
    """Samples of which the first cannot be read."""

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 0:
                raise OSError("truncated file")
            return torch.full((3,), float(index) / 40), torch.ones(2)

    def train_data(self):
        return self.Data()


class Raises(Small):
    """A model that cannot run."""

    def loss(self, model, batch):
        raise ValueError("the sheep are asleep")


class Waits(Small):
    """Reads a value of a tensor in its loss."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if loss.item() < 0:
            raise AssertionError
        return loss


class Classes(Task):
    """Three classes in uneven numbers: 20, 12 and 8 of 40; the evaluation data has others."""

    counts = (20, 12, 8)
    smoothing = 0.0

    def model(self):
        return nn.Linear(3, 3)

    def train_data(self):
        return self.data(self.counts)

    def eval_data(self):
        return self.data((3, 3, 9))

    def data(self, counts):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(3).repeat_interleave(torch.tensor(counts))
        return TensorDataset(torch.randn(len(labels), 3, generator=generator), labels)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum", label_smoothing=self.smoothing)

    def predict(self, model, batch):
        return model(batch[0]).softmax(dim=1)

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(3, average="micro")})


class Smoothed(Classes):
    smoothing = 0.1


class MetricsInADict(Classes):
    def metrics(self):
        return dict(super().metrics().items())


class PredictsOnTheObject(Classes):
    """`predict` is set on the object."""

    predict = Task.predict

    def __init__(self):
        self.predict = lambda model, batch: model(batch[0]).softmax(dim=1)


class SampledPredictions(Classes):
    """Predictions are drawn."""

    def predict(self, model, batch):
        return torch.multinomial(super().predict(model, batch), 1)


class LargeTargets(Small):
    """Targets around a million, which vary by a thousand."""

    def train_data(self):
        inputs, targets = super().train_data().tensors
        return TensorDataset(inputs, 1e6 + 1e3 * targets)


class MaskedHeads(Small):
    """Two heads, of which labels are missing unevenly; none at all of a third, and the last counts twice."""

    def model(self):
        return nn.Linear(3, 3)

    def train_data(self):
        inputs, targets = super().train_data().tensors
        valid = torch.stack([torch.arange(40) % 3 == 0, torch.arange(40) % 5 < 4, torch.zeros(40, dtype=torch.bool)], 1)
        return TensorDataset(inputs, torch.cat([targets, targets[:, :1]], 1), valid.float())

    def weight(self, batch):
        return {"a": batch[2][:, 0].sum(), "b": batch[2][:, 1].sum(), "c": batch[2][:, 2].sum()}

    coefficients = {"b": 2.0}  # noqa: RUF012

    def loss(self, model, batch):
        squares = (model(batch[0]) - batch[1]).square() * batch[2]
        return {"a": squares[:, 0].sum(), "b": squares[:, 1].sum(), "c": squares[:, 2].sum()}


class OtherShapes(Classes):
    """An output with a column less for the first 64 samples, which are all of the first class."""

    counts = (64, 12, 8)

    def collate(self, samples):
        inputs, labels = super().collate(samples)
        return inputs[:, : 2 + int(labels.max() > 0)], labels

    def model(self):
        return nn.Identity()

    def loss(self, model, batch):
        return model(batch[0]).square().sum()

    def metrics(self):
        return None


class AroundTheOutput(Classes):
    """A loss that does not come from what the model returns."""

    def loss(self, model, batch):
        return functional.cross_entropy(
            functional.linear(batch[0], model.weight, model.bias), batch[1], reduction="sum"
        )


class OutputIgnored(AroundTheOutput):
    """A loss that throws away what the model returns, and does its work again."""

    def loss(self, model, batch):
        model(batch[0])
        return super().loss(model, batch)


class NoPredictions(AroundTheOutput):
    """The same, and nothing to predict."""

    predict = Task.predict

    def metrics(self):
        return None


class LearnsNothing(Classes):
    """A loss on which the weights have no influence but by a rounding."""

    def loss(self, model, batch):
        outputs = model(batch[0])
        return (outputs - outputs.detach()).sum() + functional.cross_entropy(
            outputs.detach(), batch[1], reduction="sum"
        )


class NotBuilt(Classes):
    """A model that cannot be made."""

    def model(self):
        raise RuntimeError("no model today")


class DiceOfBatch(Small):
    """A ratio over the micro-batch, times its samples, as a mean is made a sum."""

    def loss(self, model, batch):
        shares, truth = model(batch[0]).sigmoid(), (batch[1] > 1).to(batch[0].dtype)
        common, sizes = (shares * truth).sum(), shares.sum() + truth.sum()
        common, sizes = 2 * common + 1, sizes + 1
        ratio = common / sizes  # here samples meet
        return (1 - ratio) * len(truth)


class ClassWeightsOfBatch(Small):
    """A mean by class weights, times the samples, as a mean is made a sum."""

    def loss(self, model, batch):
        labels, weights = (batch[1][:, 0] > 0).long(), batch[0].new_tensor([0.1, 1.0])
        return functional.cross_entropy(model(batch[0]), labels, weight=weights) * len(labels)  # here samples meet
