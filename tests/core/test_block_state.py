"""Blocks that change themselves in a forward pass: with recomputation they train the same bits, or are refused."""

import collections

import pytest
import torch
from torch import nn

from lockstep.core.block_state import BlockState
from lockstep.core.blocks import compile_modules, recompute_activations
from lockstep.core.config.sections import ComputeConfig
from lockstep.core.errors import TrainingError
from tests.selection import mainly

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.passes = 0

    def forward(self, hidden):
        self.passes += 1
        return hidden + self.change(hidden, hidden.detach().mean(0))

    def change(self, hidden, mean):
        raise NotImplementedError


class Buffers(Block):
    """Buffers that are written in place, through `data`, replaced, and given other memory."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            self.register_buffer(name, torch.zeros(4))

    def change(self, hidden, mean):
        self.a.mul_(0.9).add_(mean)
        self.b.data.mul_(0.9).add_(mean)
        self.c = self.c * 0.9 + mean
        self.d.data = self.d.data * 0.5 + mean
        return self.linear(hidden - self.a + 2 * self.b - self.c + self.d).tanh()


class Attributes(Block):
    """Numbers, a flag, tensors and collections, also such that the first pass makes."""

    def __init__(self):
        super().__init__()
        self.is_odd, self.items, self.by_pass, self.last = False, [], {}, collections.deque(maxlen=2)
        self.tensor, self.moved = None, torch.zeros(4)

    def change(self, hidden, mean):
        self.is_odd = not self.is_odd
        self.items.append(1)
        self.by_pass[self.passes] = 1
        self.last.append(float(mean.sum()))
        self.tensor = mean if self.tensor is None else 0.9 * self.tensor + mean
        self.moved.data.add_(mean)
        self.first = getattr(self, "first", mean)
        factor = self.passes * (2 if self.is_odd else 1) + len(self.items) + len(self.by_pass) + sum(self.last)
        return self.linear(hidden - self.tensor + self.moved + self.first).tanh() * factor


class Norms(Block):
    """Their kernels write statistics, which torch does not count."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True, momentum=0.3)

    def change(self, hidden, mean):
        statistics = self.batch.running_mean - self.instance.running_var
        return self.linear(self.batch(hidden)) + self.instance(hidden.T[None])[0].T + statistics


class Spectral(Block):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)

    def change(self, hidden, mean):
        return self.linear(hidden).tanh()


class Teacher(Block):
    """A frozen layer that begins as a copy of the trained one and follows it."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.linear.state_dict())

    def change(self, hidden, mean):
        self.follow()
        return self.linear(hidden).tanh() + self.teacher(hidden)

    def follow(self):
        with torch.no_grad():
            for one, other in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
                one.lerp_(other, 0.1)


class ThroughData(Teacher):
    def follow(self):
        for one, other in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            one.data.lerp_(other.data, 0.1)


class OtherMemory(Teacher):
    def follow(self):
        for one, other in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            one.data = one.data * 0.9 + other.data * 0.1


class Trained(Block):
    """A trained weight that a pass shrinks."""

    def change(self, hidden, mean):
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return self.linear(hidden).tanh()


class LateBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def change(self, hidden, mean):
        if self.passes > 2:
            self.mean.add_(mean)
        return self.linear(hidden - self.mean).tanh()


class Late(Teacher):
    def follow(self):
        if self.passes > 2:
            super().follow()


class LateThroughData(ThroughData):
    def follow(self):
        if self.passes > 2:
            super().follow()


class Outside(Block):
    """It writes into a buffer of another part of the model."""

    def change(self, hidden, mean):
        self.elsewhere[0].add_(mean)
        return self.linear(hidden - self.elsewhere[0]).tanh()


def trained(kind, **compute):
    """All tensors of a small model after some steps of two micro-batches each, and the state of its attributes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *(kind() for _ in range(2)))
    model[0].register_buffer("shared", torch.zeros(4))
    for block in model[1:]:
        block.elsewhere = [model[0].shared]
    settings = ComputeConfig(**compute)
    if settings.activation_checkpointing:
        recompute_activations(list(model[1:]), CPU, settings, model)
    if settings.compile:
        compile_modules(model, list(model[1:]), settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        for _ in range(2):
            model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [str(value) for block in model[1:] for name, value in vars(block).items() if not name.startswith("_")]
    return [value.tolist() for value in model.state_dict().values()], [text for text in kept if "function" not in text]


RESTORED = (Buffers, Attributes, Norms, Spectral, Teacher, ThroughData, OtherMemory, Trained, LateBuffer)


@pytest.mark.parametrize("mode", mainly(["selective"], [True, "selective"]))
def test_blocks_that_change_themselves_train_the_same_bits_with_recomputation(mode):
    for kind in RESTORED:
        plain, attributes = trained(kind)
        recomputed, attributes_again = trained(kind, activation_checkpointing=mode)
        assert recomputed == plain, kind.__name__
        assert attributes_again == attributes, kind.__name__


def test_what_cannot_be_brought_back_is_refused_with_the_names():
    late = "block 1 writes in later passes, which it did not in the first, into 1.teacher.bias, 1.teacher.weight"
    for kind, text in ((Late, late), (LateThroughData, late), (Outside, "writes outside of itself, into 0.shared")):
        with pytest.raises(TrainingError) as caught:
            trained(kind, activation_checkpointing=True)
        assert text in str(caught.value), kind.__name__


@pytest.mark.exhaustive  # without a compiler, as the test of recomputation above
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_compiled_blocks_train_the_same():
    compiled = {"activation_checkpointing": True, "compile": "blocks", "compile_backend": "aot_eager"}
    assert trained(Spectral, **compiled) == trained(Spectral)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
@pytest.mark.parametrize("what", mainly(["blocks"], ["blocks", "model"]))
def test_compiled_blocks_that_write_are_refused(what):
    compiled = {"activation_checkpointing": True, "compile": what, "compile_backend": "eager"}
    with pytest.raises(TrainingError, match=r"compiled blocks write into .*teacher\.bias"):
        trained(Teacher, **compiled)
    torch._dynamo.reset()


def test_a_pass_keeps_no_copy_of_what_it_leaves_as_it_was():
    from lockstep.core.block_state import StateChanges

    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    block.register_buffer("mask", torch.ones(100))
    state = BlockState(block)
    for _ in range(3):
        changes = StateChanges()
        with state.noted(changes):
            block(torch.ones(2, 4))
        assert changes == StateChanges()
