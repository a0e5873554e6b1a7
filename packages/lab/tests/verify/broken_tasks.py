"""Small tasks that are right, and the same with one fault each: what users write wrong, for `lockstep verify` to find.

The first paragraph of a broken task's docstring says what is wrong with it.
"""

import copy
import functools
import math
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from lockstep import Metrics, Presenter, Task

FEATURES, CLASSES = 6, 5


class Clouds(Dataset):
    """Samples around one centre per class."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        centres = 2.0 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(0, CLASSES, (length,), generator=generator)
        self.inputs = centres[self.labels] + 0.7 * torch.randn(length, FEATURES, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], int(self.labels[index])


class Network(nn.Module):
    """A layer of 13 features, which no number of ranks divides, and a head; optionally dropout and BatchNorm."""

    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.body = nn.Linear(FEATURES, 13)
        self.norm = nn.BatchNorm1d(13) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(13, CLASSES)

    def forward(self, inputs):
        return self.head(self.drop(self.norm(self.body(inputs)).tanh()))


class ShowsClass(Presenter):
    def describe(self, output):
        return {"prediction": int(output.argmax())}

    def truth(self, sample):
        return int(sample[1])


class Classes(Task):
    """Right: a label per sample, cross-entropy summed over samples, noise as augmentation. factor: of the loss."""

    presenter = ShowsClass

    def __init__(self, length=203, eval_length=67, dropout=0.0, norm=False, factor=1.0):
        self.length, self.eval_length, self.dropout, self.norm, self.factor = length, eval_length, dropout, norm, factor

    def model(self):
        return Network(self.dropout, self.norm)

    def train_data(self):
        return Clouds(self.length, 1)

    def eval_data(self):
        return Clouds(self.eval_length, 2)

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        return inputs + (0.1 * torch.randn(FEATURES) if training else 0.0), label

    def loss(self, model, batch):
        return self.factor * functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0]).float().softmax(dim=1)

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(CLASSES, average="micro")})


class FollowingNetwork(Network):
    """A second body follows the first in each forward pass."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(FEATURES, 13).requires_grad_(False)

    def forward(self, inputs):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.body.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return self.head((self.body(inputs) + self.slow(inputs)).tanh())


class Following(Classes):
    """Right: the model has a momentum encoder, which changes in each forward pass and learns nothing."""

    def model(self):
        return FollowingNetwork()


class ShowsFirstTarget(Presenter):
    def describe(self, output):
        return {"first": round(float(output[0]), 3)}

    def truth(self, sample):
        return round(float(sample[1][0]), 3)


class Targets(Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        teacher = torch.randn(FEATURES, 5, generator=torch.Generator().manual_seed(0))
        self.inputs = torch.randn(length, FEATURES, generator=generator)
        self.targets = 2.0 * (self.inputs @ teacher).tanh() + 1.0
        chance = torch.rand(length, 1, generator=generator) ** 2
        self.mask = torch.rand(length, 5, generator=generator) < chance + 0.05

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index], self.mask[index]


class Masked(Task):
    """Right: five targets per sample, of which few and unevenly many are valid; the loss is a mean over valid ones."""

    presenter = ShowsFirstTarget

    def __init__(self, length=203, eval_length=67):
        self.length, self.eval_length = length, eval_length

    def model(self):
        return nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 5))

    def train_data(self):
        return Targets(self.length, 1)

    def eval_data(self):
        return Targets(self.eval_length, 2)

    def weight(self, batch):
        return batch[2].sum()

    def loss(self, model, batch):
        return ((model(batch[0]) - batch[1]).square() * batch[2]).sum()

    def predict(self, model, batch):
        return model(batch[0])


class Tensors(Classes):
    """Right: a data set of tensors that are not prepared: inputs, labels and, where there are some, importances."""

    prepare, collate = Task.prepare, Task.collate

    def train_data(self):
        data = super().train_data()
        return TensorDataset(data.inputs, data.labels, 1.0 + (torch.arange(len(data)) % 3))

    def eval_data(self):
        data = super().eval_data()
        return TensorDataset(data.inputs, data.labels)

    def loss(self, model, batch):
        inputs, labels, *importances = batch
        losses = functional.cross_entropy(model(inputs), labels, reduction="none")
        return (losses * importances[0]).sum() if importances else losses.sum()


class Many(Masked):
    """Right: a data set that reads many samples at once."""

    def train_data(self):
        return ManyTargets(self.length, 1)


class ManyTargets(Targets):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OnTheObject(Tensors):
    """Right: the same, with methods that are set on the object: preparation adds a number, and a batch is a dict."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.prepare = functools.partial(shifted, 0.5)
        self.collate = functools.partial(with_scale, 0.5)


def shifted(number, sample, epoch, training):
    return sample[0] + number, *sample[1:]


def with_scale(factor, samples):
    inputs, *others = torch.utils.data.default_collate(samples)
    return [factor * inputs, *others]


class Rarely(Classes):
    """Right: few samples are augmented, and NumPy draws for those alone."""

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        if training and float(inputs[0]) > 0.9:
            inputs = inputs + torch.from_numpy(np.random.normal(size=FEATURES)).float()
        return inputs, label


class Forked(Classes):
    """Right: the augmentation draws from a generator that is put back afterwards."""

    def prepare(self, sample, epoch, training):
        with torch.random.fork_rng(devices=[]):
            return super().prepare(sample, epoch, training)


class MixedInLoss(Classes):
    """Right: the loss mixes each sample of a batch with its neighbour, by a share from NumPy's or Python's generator.

    generator: numpy or random.
    """

    def __init__(self, *arguments, generator="numpy", **options):
        super().__init__(*arguments, **options)
        self.generator = generator

    def loss(self, model, batch):
        inputs, labels = batch
        share = np.random.beta(2, 2) if self.generator == "numpy" else random.betavariate(2, 2)
        outputs = model(share * inputs + (1 - share) * inputs.roll(1, 0))
        losses = [functional.cross_entropy(outputs, one, reduction="sum") for one in (labels, labels.roll(1))]
        return self.factor * (share * losses[0] + (1 - share) * losses[1])


class MixedInCollate(Classes):
    """Right: the same in `collate`, for inputs alone."""

    def prepare(self, sample, epoch, training):
        return sample

    def collate(self, samples):
        inputs, labels = super().collate(samples)
        share = np.random.beta(5, 1)
        return share * inputs + (1 - share) * inputs.roll(1, 0), labels


class FrozenNorm(Classes):
    """Right: BatchNorm is frozen in the usual way, by a `train` of the model's own."""

    def model(self):
        return FrozenNetwork(self.dropout, norm=True)


class FrozenNetwork(Network):
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class TwoHeads(Masked):
    """Right: two losses with units of their own: `values` over valid targets, and `size` over samples, times three."""

    def weight(self, batch):
        return {"values": batch[2].sum(), "size": torch.tensor(float(len(batch[0])))}

    coefficients = {"size": 3.0}  # noqa: RUF012

    def loss(self, model, batch):
        outputs = model(batch[0])
        size = (outputs.mean(dim=1) - batch[1].mean(dim=1)).square().sum()
        return {"values": ((outputs - batch[1]).square() * batch[2]).sum(), "size": size}


class HeadsByRank(TwoHeads):
    """Right: its dicts have another order on odd ranks."""

    def weight(self, batch):
        return self.ordered(super().weight(batch))

    def loss(self, model, batch):
        return self.ordered(super().loss(model, batch))

    def ordered(self, heads):
        return dict(sorted(heads.items(), reverse=int(os.environ["RANK"]) % 2 == 1))


class Sequences(Dataset):
    """Sequences of up to 7 tokens; places after the end have the label -100."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (length, 7), generator=generator)
        centres = 2.0 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
        self.inputs = centres[self.labels] + 0.7 * torch.randn(length, 7, FEATURES, generator=generator)
        ends = torch.randint(1, 8, (length, 1), generator=generator)
        self.labels[torch.arange(7) >= ends] = -100

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Tokens(Task):
    """Right: a label per token, cross-entropy over the tokens of which there are labels."""

    def model(self):
        return nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, CLASSES))

    def train_data(self):
        return Sequences(203, 1)

    def eval_data(self):
        return Sequences(67, 2)

    def weight(self, batch):
        return (batch[1] >= 0).sum()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    def predict(self, model, batch):
        return model(batch[0])


class Grouped(Tokens):
    """Right: the same, with the lengths of the sequences, by which samples may be grouped."""

    def train_data(self):
        data = super().train_data()
        data.lengths = (data.labels >= 0).sum(1).numpy()
        return data


class Weighted(Classes):
    """Right: samples are drawn by weights, of which some are 0."""

    def train_data(self):
        data = super().train_data()
        data.sample_weights = torch.arange(self.length) % 5
        return data


class OrderOfHalves:
    """The first half of a data set in epochs of even number, the second half in the others; each sample twice."""

    def __init__(self, length):
        self.length = length

    def __call__(self, positions, *, seed, epoch):
        half = self.length // 2
        return (positions * 3 + seed) % half + half * (epoch % 2)


class OwnOrder(Classes):
    """Right: the data set has an order of its own."""

    def train_data(self):
        data = super().train_data()
        data.order = OrderOfHalves(self.length)
        return data


# ---- labels and inputs


class LabelsRolled(Classes):
    """A batch's labels are rolled by one against its inputs."""

    def collate(self, samples):
        inputs, labels = super().collate(samples)
        return inputs, labels.roll(1)


class LabelsDrawn(Classes):
    """Each sample's label is drawn anew in every epoch."""

    def prepare(self, sample, epoch, training):
        inputs, _ = super().prepare(sample, epoch, training)
        return inputs, random.randrange(CLASSES)


class InputsBlank(Classes):
    """Every input is read as zeros."""

    def prepare(self, sample, epoch, training):
        return torch.zeros(FEATURES), sample[1]


class InputsAveraged(Classes):
    """Inputs are averaged over the batch instead of over features."""

    def collate(self, samples):
        inputs, labels = super().collate(samples)
        return inputs.mean(dim=0, keepdim=True).expand_as(inputs).contiguous(), labels


class ChannelsSwapped(Classes):
    """Evaluation reads the features in reversed order, as where one image reader gives RGB and the other BGR."""

    def prepare(self, sample, epoch, training):
        inputs, label = super().prepare(sample, epoch, training)
        return inputs if training else inputs.flip(0), label


class OtherClassNumbers(Classes):
    """The evaluation data number their classes in another order than the training data."""

    def eval_data(self):
        data = super().eval_data()
        data.labels = (data.labels + 2) % CLASSES
        return data


class ClassesInHashOrder(Classes):
    """Class numbers come from the iteration order of a set of names, which each process has its own."""

    def prepare(self, sample, epoch, training):
        inputs, label = super().prepare(sample, epoch, training)
        return inputs, [int(name[1:]) for name in {f"c{number}" for number in range(CLASSES)}].index(label)


class DataOfEachRank(Classes):
    """Every rank draws the data set by itself."""

    def train_data(self):
        return Clouds(self.length, 1 + int(os.environ["RANK"]))


class FreshGenerator(Classes):
    """Augmentation draws from numpy.random.default_rng(), which nothing seeds."""

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        noise = np.random.default_rng().normal(size=FEATURES) if training else np.zeros(FEATURES)
        return inputs + 0.1 * torch.tensor(noise, dtype=inputs.dtype), label


class SeedsTorch(Classes):
    """Before augmentation, torch is seeded with the same number for every sample."""

    def prepare(self, sample, epoch, training):
        torch.manual_seed(0)
        return super().prepare(sample, epoch, training)


class SeedsNumpy(Classes):
    """The data set seeds NumPy with the same number for every sample, and augmentation draws from it."""

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        np.random.seed(0)
        return inputs + (0.1 * torch.from_numpy(np.random.randn(FEATURES)).float() if training else 0.0), label


class EvaluatesTraining(Classes):
    """Some of the evaluation data are training data."""

    def eval_data(self):
        data, training = super().eval_data(), self.train_data()
        data.inputs[:20], data.labels[:20] = training.inputs[50:70], training.labels[50:70]
        return data


class LabelAmongInputs(Classes):
    """The last input of each sample is its label."""

    def prepare(self, sample, epoch, training):
        inputs, label = super().prepare(sample, epoch, training)
        return torch.cat([inputs[:-1], torch.tensor([float(label)])]), label


class CountsReads(Classes):
    """Augmentation counts the samples that were read before; an engine cannot seed that."""

    reads = 0

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        self.reads += 1
        return inputs + (0.1 * math.sin(self.reads) if training else 0), label


class TimedNoise(Classes):
    """Augmentation is seeded with the clock."""

    def prepare(self, sample, epoch, training):
        torch.manual_seed(time.perf_counter_ns() % 2**31)
        return super().prepare(sample, epoch, training)


# ---- model


class LogitsOff(Classes):
    """A gate at zero multiplies the logits, and is no parameter."""

    def loss(self, model, batch):
        return functional.cross_entropy(0.0 * model(batch[0]), batch[1], reduction="sum")


class DeadBranch(Classes):
    """A second branch of the network is multiplied by zero."""

    def model(self):
        model = super().model()
        model.second = nn.Linear(FEATURES, CLASSES)
        return model

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]) + 0.0 * model.second(batch[0]), batch[1], reduction="sum")


class DetachedBody(Classes):
    """What the head gets is detached, so that the body never learns."""

    def loss(self, model, batch):
        return functional.cross_entropy(model.head(model.body(batch[0]).tanh().detach()), batch[1], reduction="sum")


class DeadUnits(Classes):
    """A bias of -100 in front of a ReLU lets nothing through."""

    def model(self):
        model = super().model()
        nn.init.constant_(model.body.bias, -100.0)
        return model

    def loss(self, model, batch):
        return functional.cross_entropy(model.head(model.body(batch[0]).relu()), batch[1], reduction="sum")


class EvaluationMode(Classes):
    """The loss puts the model into evaluation mode and leaves it there."""

    def loss(self, model, batch):
        model.eval()
        return super().loss(model, batch)


class NoisyInEvaluation(Classes):
    """In evaluation mode, the model adds noise from the operating system to its outputs."""

    def predict(self, model, batch):
        return super().predict(model, batch) + 0.1 * int.from_bytes(os.urandom(2), "little") / 2**16


class DropoutInEvaluation(Classes):
    """The loss and the predictions drop features in evaluation mode, too."""

    def loss(self, model, batch):
        return super().loss(model, (functional.dropout(batch[0], 0.1), batch[1]))

    def predict(self, model, batch):
        return super().predict(model, (functional.dropout(batch[0], 0.1), batch[1]))


class ClockSeededModel(Classes):
    """The model draws its initial weights under a seed from the clock."""

    def model(self):
        torch.manual_seed(time.perf_counter_ns() % 2**31)
        return super().model()


class ScaledLayer(nn.Linear):
    scale = 1.0

    def forward(self, inputs):
        return self.scale * super().forward(inputs)


class ModeByClock(Classes):
    """A number of the model comes from the clock."""

    def model(self):
        model = super().model()
        model.body = ScaledLayer(FEATURES, 13)
        model.body.scale = 1.0 + time.perf_counter_ns() % 1000 / 1e4
        return model


class BranchOnFirstRank(Classes):
    """A layer of the network is used on rank 0 alone."""

    def model(self):
        model = super().model()
        model.second = nn.Linear(FEATURES, CLASSES)
        return model

    def loss(self, model, batch):
        outputs = model(batch[0]) + (model.second(batch[0]) if os.environ["RANK"] == "0" else 0.0)
        return functional.cross_entropy(outputs, batch[1], reduction="sum")


class BranchOnFirstRankOfGroup(BranchOnFirstRank):
    """A layer of the network is used on rank 0 of the process group alone."""

    def loss(self, model, batch):
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        outputs = model(batch[0]) + (model.second(batch[0]) if is_first else 0.0)
        return functional.cross_entropy(outputs, batch[1], reduction="sum")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.tanh()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


class WrongBackward(Classes):
    """An activation has a backward pass of its own, which is not its derivative."""

    def loss(self, model, batch):
        outputs = model.head(Doubled.apply(model.body(batch[0])))
        return functional.cross_entropy(outputs, batch[1], reduction="sum")


# ---- loss and weight


class PaddingCounted(Tokens):
    """The weight counts all places, and the loss leaves out places without a label."""

    def weight(self, batch):
        return torch.tensor(float(batch[1].numel()))


class MeanLoss(Classes):
    """The loss is a mean over the batch where a sum is asked for."""

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])


class SoftmaxOverSamples(Classes):
    """Probabilities are normalised over the batch instead of over classes."""

    def loss(self, model, batch):
        return functional.nll_loss(model(batch[0]).log_softmax(dim=0), batch[1], reduction="sum")


class CoupledLoss(Classes):
    """Logits are centred over the batch, so that samples influence each other."""

    def loss(self, model, batch):
        logits = model(batch[0])
        return functional.cross_entropy(logits - 0.5 * logits.mean(dim=0), batch[1], reduction="sum")


class OutputsAgainstAllLabels(Classes):
    """Outputs of shape (N, 1) are compared with labels of shape (N,), and so with the labels of all samples."""

    def loss(self, model, batch):
        return (model(batch[0])[:, :1] - batch[1]).square().sum()


class MeanContrast(Classes):
    """The loss has the other samples of the batch as negatives, and is a mean where a sum is asked for."""

    def loss(self, model, batch):
        outputs = functional.normalize(model(batch[0]), dim=1)
        return functional.cross_entropy(outputs @ outputs.T * 5, torch.arange(len(outputs)))


class MeanClassContrast(Classes):
    """The loss attracts samples of the same class, and is a mean over those that have one where a sum is asked for."""

    def loss(self, model, batch):
        outputs = functional.normalize(model(batch[0]), dim=1)
        itself = torch.eye(len(outputs), dtype=torch.bool)
        positives = (batch[1][:, None] == batch[1]) & ~itself
        logs = (outputs @ outputs.T * 5).masked_fill(itself, -1e9).log_softmax(dim=1)
        has_one = positives.any(dim=1)
        losses = (logs * positives).sum(dim=1) / positives.sum(dim=1).clamp(min=1)
        return -losses.sum() / has_one.sum().clamp(min=1)


class MeanOfPairs(Classes):
    """The loss is a mean over all pairs of samples. The weight counts the pairs."""

    def weight(self, batch):
        return torch.tensor(float(len(batch[1]) ** 2))

    def loss(self, model, batch):
        distances = torch.cdist(model(batch[0]), model(batch[0]))
        same = batch[1][:, None] == batch[1]
        return torch.where(same, distances, (4 - distances).clamp(min=0)).square().mean()


class MaskedMean(Masked):
    """The loss is a mean over the valid targets of the micro-batch; the weight counts them rightly."""

    def loss(self, model, batch):
        return super().loss(model, batch) / batch[2].sum().clamp(min=1)


class MeanOfOneHead(TwoHeads):
    """One of two losses is a mean over the valid targets of the micro-batch, the other a sum. The weights are right."""

    def loss(self, model, batch):
        heads = super().loss(model, batch)
        return heads | {"values": heads["values"] / batch[2].sum().clamp(min=1)}


class WeightIsShare(Masked):
    """The weight is the share of valid targets, which does not add up over micro-batches."""

    def weight(self, batch):
        return batch[2].float().mean()


class WeightAtLeastFour(Masked):
    """The weight of a batch with few valid targets is rounded up."""

    def weight(self, batch):
        return batch[2].sum().clamp(min=4)


class RegularisedPerBatch(Classes):
    """A penalty on the weights is added to the loss of each micro-batch, however many there are."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 2.0 * model.head.weight.square().sum()


class NoisyLoss(Classes):
    """The loss has noise that the operating system draws."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 + int.from_bytes(os.urandom(2), "little") / 2**24)


class ReadsLoss(Classes):
    """The loss is a hundredth as large in odd milliseconds."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 if time.perf_counter_ns() % 2 else 0.999)


class PerRankLoss(Classes):
    """The loss depends on the rank: a debugging line that was left in."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 if os.environ["RANK"] == "0" else 1.01)


class Uphill(Classes):
    """The loss has the wrong sign: the likelihood is made small."""

    def loss(self, model, batch):
        return -super().loss(model, batch).clamp(max=1000.0)


# ---- outputs


class WrongTarget(Classes):
    """The metric compares with the labels of other samples."""

    def metrics(self):
        return Metrics(super().metrics(), lambda metrics, output, batch: metrics.update(output, batch[1].roll(1)))


class MeanOfBatches(Classes):
    """The metric is the mean over the accuracies of batches, whatever their sizes."""

    def metrics(self):
        from torchmetrics import MeanMetric

        def update(metrics, output, batch):
            metrics.update((output.argmax(dim=1) == batch[1]).float().mean())

        return Metrics({"accuracy": MeanMetric()}, update)


class NegatedLogits(Classes):
    """Predictions are the softmax of negated logits."""

    def predict(self, model, batch):
        return (-model(batch[0])).softmax(dim=1)


class OneClass(Classes):
    """The prediction is always the first class."""

    def predict(self, model, batch):
        return functional.one_hot(torch.zeros(len(batch[0]), dtype=torch.long), CLASSES).float()


class FirstOfBatch(Classes):
    """Every sample of a batch gets the first one's output."""

    def predict(self, model, batch):
        return super().predict(model, batch)[:1].expand(len(batch[0]), -1).contiguous()


class FreshModel(Classes):
    """Predictions come from another model, whose weights are all zero, and not from the trained model."""

    def predict(self, model, batch):
        fresh = copy.deepcopy(model)  # to make a new model would draw random numbers
        for parameter in fresh.parameters():
            nn.init.zeros_(parameter)
        return super().predict(fresh, batch)


class ShowsProbabilityAsClass(ShowsClass):
    def describe(self, output):
        return {"prediction": int(output.max() * 0.999)}


class ProbabilityAsClass(Classes):
    """The class shown is the largest probability, cut to an integer."""

    presenter = ShowsProbabilityAsClass
