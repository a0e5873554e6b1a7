"""Tasks and trainings for the tests on GPUs. They are importable, because ranks get them by name."""

import contextlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Task, Trainer
from lockstep.configs import config_file
from lockstep.core.config.sections import ComputeConfig
from lockstep.core.parallel.world import join_world
from lockstep.trainer import assemble
from lockstep.trainer.joining import Recorder
from tests import runs


class Wide(Task):
    """Linear layers without bias: the memory of the training is that of their weights."""

    layers = 4

    def __init__(self, width):
        self.width = width

    @property
    def parameters(self):
        return self.layers * self.width**2

    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers)))

    def train_data(self):
        return TensorDataset(torch.randn(8, self.width, generator=torch.Generator().manual_seed(0)))

    def loss(self, model, batch):
        return model(batch[0]).square().mean(1).sum()


class Hungry(Task):
    """Few weights, and activations of `floats` numbers for each sample, several times over."""

    def __init__(self, floats):
        self.repeats = floats // 8

    def model(self):
        return nn.Linear(8, 8)

    def train_data(self):
        return TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))

    def loss(self, model, batch):
        hidden = model(batch[0]).repeat(1, self.repeats)
        return hidden.tanh().sigmoid().tanh().mean(1).sum()


class Overflows(Task):
    """The first gradients overflow in fp16: the loss scale begins at 2**16."""

    def model(self):
        return nn.Linear(4, 4)

    def train_data(self):
        return TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def loss(self, model, batch):
        return (model(batch[0]).half() * 40.0).float().square().mean(1).sum()


class ByKeyword(nn.Module):
    """A block with dropout that is called with keywords alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(10, 10), nn.Dropout(0.3)

    def forward(self, *, hidden):
        return hidden + self.drop(self.linear(hidden).tanh())


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(ByKeyword() for _ in range(3)), nn.Linear(10, 5)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(hidden=inputs)
        return self.head(inputs)


class CalledByKeyword(Task):
    """A model whose blocks are called with keywords alone."""

    def model(self):
        return Keywords()

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(96, 10, generator=generator), torch.randn(96, 5, generator=generator))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(1).sum()


class Long(Task):
    """Large batches, and a computation that takes longer than their copies."""

    width, samples = 8192, 2048

    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(6)))

    def train_data(self):
        return TensorDataset(torch.randn(2 * self.samples, self.width, generator=torch.Generator().manual_seed(0)))

    def loss(self, model, batch):
        return model(batch[0]).square().mean(1).sum()


class Convolutions(Task):
    """Pictures, convolutions, BatchNorm, dropout, and a loss by class: what cuDNN computes in several ways."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(),
            nn.Dropout(0.2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 5),
        )  # fmt: skip

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        pictures = torch.randn(96, 3, 20, 20, generator=generator)
        return TensorDataset(pictures, torch.randint(5, (96,), generator=generator))

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Attention(Task):
    """Tokens, an embedding that is used again and again, attention with dropout, and a loss by token."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)
            )

        def forward(self, tokens):
            hidden = self.embed(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden)

    def model(self):
        return self.Net()

    def train_data(self):
        return TensorDataset(torch.randint(50, (96, 24), generator=torch.Generator().manual_seed(0)))

    def weight(self, batch):
        return batch[0].numel()

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="sum")


# ---- trainings

DETERMINISTIC = {"deterministic": True} if "deterministic" in ComputeConfig.model_fields else {}
"""The section `compute` of trainings whose bits are compared."""


class StepReads(Recorder):
    """Notes how the host waited for the device in each step: in the loop's part of it, too, and in the next copy."""

    def __init__(self, place):
        self.place, self.by_step, self.watched = place, [], contextlib.ExitStack()

    def before_step(self, training):
        self.watch()

    def end(self, training):
        self.watched.close()

    def close(self):
        self.watched.close()

    def watch(self):
        """Note the waits until the next call: those of a step, and of reading the next batch."""
        self.watched.close()
        found = self.watched.enter_context(self.place.reads())
        self.watched.callback(self.by_step.append, found)


def reads_in_steps(place, task, settings, folder):
    """The waits of the host in the steps between the first and the last, which log, and the results of the training."""
    reads = StepReads(place)
    results = Trainer(settings, run_dir=folder, quiet=True).fit(task, reads)
    return [line for step in reads.by_step[1:-1] for line in step], results


@contextlib.contextmanager
def prepared(task, settings):
    """A training in memory that is ready for its first step."""
    config = config_file.parse(settings, needs_task=False)
    with join_world(config.device, config.parallel.timeout_s) as world:
        yield assemble.in_memory(config, task, world).run


def take_steps(run, count):
    """Take steps of a `prepared` training."""
    state = run.state
    for _ in range(count):
        run.update(state, next(run.batches), run.plan.samples(state.step))


def weights(task, settings, run_dir=None):
    """Final weights of a training, in host memory."""
    return {name: tensor.cpu() for name, tensor in runs.fit(task, settings, run_dir)[0].items()}


def same(one, other):
    """Names of the tensors that differ in a bit or more."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def logged(folder, name):
    """The values of a name in the log of a run, by step."""
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


def fit_on_rank(kind, options, settings):
    """Final weights of a training on this rank, in host memory. Ranks get the class by name: of this module, or of
    `tests/own_tasks.py`."""
    from tests import own_tasks

    make = globals().get(kind) or getattr(own_tasks, kind)
    return weights(make(**options), settings)
