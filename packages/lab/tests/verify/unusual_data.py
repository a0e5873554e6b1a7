"""Right tasks with unusual data, configs or methods: `lockstep verify` must find no fault in them."""

import dataclasses
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep import Presenter, Task
from packages.lab.tests.verify.unusual_losses import _Regression
from packages.lab.tests.verify.unusual_models import _Classifier, points


class ThreeSamples(_Regression):
    """Three training samples and two of evaluation."""

    overrides = {"optim.lr": "0.005", "batch.global": "2"}  # noqa: RUF012

    def __init__(self):
        self.train, self.held_out = self.data(3, 0), self.data(2, 1)


class OneClassMissing(_Classifier):
    """The evaluation data have a class less."""

    def __init__(self):
        super().__init__()
        inputs, labels = self.held_out.tensors
        self.held_out = TensorDataset(inputs[labels != 2], labels[labels != 2])


class SortedByClass(_Classifier):
    """The samples are stored class after class, in two data sets that are joined."""

    def __init__(self):
        super().__init__()
        parts = [
            Subset(self.train, (self.train.tensors[1] == label).nonzero().flatten().tolist()) for label in range(4)
        ]
        self.train = ConcatDataset(parts)


class Dictionaries(_Classifier):
    """Samples are dictionaries with texts and plain numbers, as files have them."""

    class Rows(Dataset):
        def __init__(self, data):
            self.inputs, self.labels = (tensor.numpy() for tensor in data.tensors)

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, index):
            return {"name": f"row {index}", "inputs": self.inputs[index], "label": int(self.labels[index])}

    class Shows(Presenter):
        def describe(self, output):
            return {"classes": [f"{share:.6f}" for share in output.tolist()]}

        def truth(self, sample):
            return sample["label"]

    presenter = Shows

    def __init__(self):
        super().__init__()
        self.train, self.held_out = self.Rows(self.train), self.Rows(self.held_out)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch["inputs"]), batch["label"], reduction="sum")

    def predict(self, model, batch):
        return model(batch["inputs"]).softmax(-1)

    def metrics(self):
        return None


@dataclasses.dataclass
class Graphs:
    """Graphs of different sizes as one large graph."""

    nodes: torch.Tensor
    graph_of_node: torch.Tensor
    labels: torch.Tensor


class GraphTask(Task):
    """Graphs of different sizes, whose batch is a data class; the class is that of most nodes."""

    overrides = {"batch.global": "20"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 4)

        def forward(self, graphs):
            nodes = self.first(graphs.nodes).relu()
            sums = nodes.new_zeros(len(graphs.labels), 24).index_add(0, graphs.graph_of_node, nodes)
            return self.last(sums / torch.bincount(graphs.graph_of_node)[:, None])

    def __init__(self):
        self.train, self.held_out = self.graphs(200, 0), self.graphs(60, 1)

    def graphs(self, count, seed):
        sizes = torch.randint(2, 7, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        inputs, labels = points(count, seed=seed)
        noise = torch.Generator().manual_seed(seed + 9)
        return [
            (row + 0.5 * torch.randn(size, 12, generator=noise), label)
            for row, size, label in zip(inputs, sizes, labels, strict=True)
        ]

    def model(self):
        return self.Net()

    def train_data(self):
        return self.train

    def eval_data(self):
        return self.held_out

    def collate(self, samples):
        sizes = torch.tensor([len(nodes) for nodes, _ in samples])
        return Graphs(
            torch.cat([nodes for nodes, _ in samples]),
            torch.arange(len(samples)).repeat_interleave(sizes),
            torch.stack([label for _, label in samples]),
        )

    def weight(self, batch):
        return len(batch.labels)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch), batch.labels, reduction="sum")

    def predict(self, model, batch):
        return model(batch).softmax(-1)


class EpochDependent(_Classifier):
    """Augmentation grows weaker with the epoch, with workers and random numbers of all three generators."""

    overrides = {"data.workers": "2"}  # noqa: RUF012

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        if training:
            strength = 0.3 / (1 + epoch)
            inputs = inputs + strength * torch.randn(12) * random.random() + 0.01 * float(np.random.rand())
        return inputs, label


class CropsOfSizes(_Classifier):
    """Sequences are cropped to a random length and padded in collate, with a mask."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 24), nn.Linear(24, 4)

        def forward(self, inputs, mask):
            hidden = self.first(inputs).relu() * mask.unsqueeze(-1)
            return self.last(hidden.sum(1) / mask.sum(1, keepdim=True))

    def prepare(self, sample, epoch, training):
        inputs, label = sample
        rows = inputs.view(4, 3)
        rows = torch.cat([rows, torch.eye(4)[:, :0]], dim=1)
        return (rows[: int(torch.randint(3, 5, ()))] if training else rows), label

    def collate(self, samples):
        rows = [inputs for inputs, _ in samples]
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), mask, torch.stack([label for _, label in samples])

    def model(self):
        return self.Net()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0], batch[1]).softmax(-1)

    def metrics(self):
        return None


class LayerDecay(_Classifier):
    """Lower learning rates for earlier layers, with averages of the weights."""

    overrides = {"optim.layer_decay": "0.7", "train.ema_decay": "0.9", "optim.lr": "0.02"}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
            self.head = nn.Linear(12, 4)

        def forward(self, inputs):
            for layer in self.layers:
                inputs = inputs + layer(inputs).relu()
            return self.head(inputs)

    def model(self):
        return self.Net()


class PlainSgd(_Classifier):
    """SGD with Nesterov momentum and no clipping, a cosine schedule, and groups without weight decay."""

    overrides = {  # noqa: RUF012
        "optim.name": "SGD",
        "optim.lr": "0.05",
        "optim.clip_norm": "null",
        "optim.args": "{momentum: 0.9, nesterov: true}",
        "schedule.name": "cosine",
    }


class HalfPrecision(_Classifier):
    """bf16, activation checkpointing and label smoothing."""

    overrides = {"precision": "bf16"}  # noqa: RUF012

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum", label_smoothing=0.1)

    def predict(self, model, batch):
        return model(batch[0]).float().softmax(-1)


class Sharded(_Classifier):
    """FSDP with uneven parameters: layers of 5, 7 and 1 rows."""

    overrides = {"parallel.strategy": "fsdp"}  # noqa: RUF012

    def model(self):
        return nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 4))


class SeveralOutputs(_Regression):
    """`predict` gives a dictionary of numbers of several kinds."""

    class Shows(Presenter):
        def describe(self, output):
            return {"value": round(float(output["value"]), 4), "high": bool(output["high"])}

        def truth(self, sample):
            return float(sample[1])

    presenter = Shows

    def predict(self, model, batch):
        value = model(batch[0])[:, 0]
        return {"value": value, "high": value > 0}


class LargeOffsets(_Regression):
    """Targets around a million, which the task centres in its loss by numbers from its training data."""

    def data(self, count, seed):
        data = super().data(count, seed)
        return TensorDataset(data.tensors[0], 1e6 + 1e3 * data.tensors[1])

    def loss(self, model, batch):
        return (model(batch[0]) - (batch[1] - 1e6) / 1e3).square().sum()

    def predict(self, model, batch):
        return model(batch[0]) * 1e3 + 1e6


class WholeNumbersOnly(_Classifier):
    """Inputs are bytes, which the loss scales."""

    def __init__(self):
        super().__init__()
        self.train, self.held_out = (
            TensorDataset((20 * data.tensors[0] + 128).clamp(0, 255).byte(), data.tensors[1])
            for data in (self.train, self.held_out)
        )

    def inputs(self, model, batch):
        return (batch[0].to(next(model.parameters()).dtype) - 128) / 20

    def loss(self, model, batch):
        return functional.cross_entropy(model(self.inputs(model, batch)), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(self.inputs(model, batch)).softmax(-1)


class AreaUnderCurve(_Classifier):
    """A metric that keeps all scores, and another that is a running mean."""

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAUROC, MulticlassCalibrationError

        return MetricCollection({"area": MulticlassAUROC(4), "calibration": MulticlassCalibrationError(4)})


class NoisyLabels(_Classifier):
    """A tenth of the labels are wrong, and no model explains them."""

    def __init__(self):
        super().__init__()
        inputs, labels = self.train.tensors
        wrong = torch.arange(len(labels)) % 10 == 0
        self.train = TensorDataset(inputs, torch.where(wrong, (labels + 1) % 4, labels))
