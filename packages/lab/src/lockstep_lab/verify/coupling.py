"""Is the loss of a batch the sum over its parts? If not, it is a mean, or samples influence each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.task import Task
from lockstep_lab.verify.comparable_task import sum_of_heads
from lockstep_lab.verify.derivative import own_backwards
from lockstep_lab.verify.meeting_place import ResultRecorder, meeting_place
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.step_operations import CoarseOperations, ComparingOperations

COUPLED = 1e3  # roundings; if the loss is further off, samples influence each other
_IS_MEAN = 1e-3  # relative difference below which a batch's loss is the mean over its halves, in coarse formats
_SHRINKS = 0.8  # of the loss per unit: a sum over samples with their negatives grows, a mean has about 0.6

Batch = tuple[Any, int]
"""With its number of samples."""


@dataclass
class Coupling:
    """The facts about the loss that a batch and its halves show."""

    epsilon: float = 0.0
    """Relative rounding of the coarsest number format that the model or the loss uses."""
    coarse: str = ""
    """This number format and a place, if the model or the loss converts to it on the way."""
    own_backwards: list[str] = field(default_factory=list)
    """Classes of `torch.autograd.Function` in the graph of the loss, with file and line."""
    coupling: float = 0.0
    """Difference between the loss of a batch and the sum over its halves, relative to the loss; of the worst head."""
    mean_heads: list[str] = field(default_factory=list)
    """Heads whose loss of a batch is the mean over its halves, instead of the sum."""
    meets_at: str = ""
    """The operation in which samples first influence each other, and its place; empty if unknown."""
    without_labels: bool = False
    """True if every tensor of a batch goes into the model."""
    has_comparison: bool = False
    """True if the loss has a number for each pair of samples, or sorts them, and outputs do not couple samples."""
    compares_samples: str = ""
    """How the loss compares the samples of a batch on purpose; empty if it does not."""


def measure_coupling(task: Task, model: nn.Module, batches: Sequence[Batch]) -> Coupling:
    """Find out whether the loss of each head is a sum over samples, and make a backward pass.

    Args:
        task: with weights that no pass changes.
        batches: a batch and its halves. A single sample has one half.
    """
    (whole, _), *halves = batches
    with _recorded(model, batches[0][1]) as record, CoarseOperations() as coarse:
        losses = data.losses(task, model, whole)
        objective = sum_of_heads(losses)
        functions = list(own_backwards(objective))
        torch.autograd.backward(objective)
    found = Coupling(max(torch.finfo(objective.dtype).eps, coarse.epsilon), coarse.words, functions)
    if len(halves) < 2:
        return found
    losses_of_halves, records = [], []
    for half, size in halves:
        with torch.no_grad(), _recorded(model, size) as record_of_half:
            losses_of_halves.append(data.losses(task, model, half))
        records.append(record_of_half)
    units = [data.count_units(task, [half]) for half in halves]
    near = min(_IS_MEAN, COUPLED * found.epsilon)  # a ratio over the batch is almost the mean of ratios
    for head, loss in losses.items():
        value, first, second = float(loss.detach()), *(float(half[head]) for half in losses_of_halves)
        scale = max(abs(value), abs(first) + abs(second), 1e-30)
        coupling = abs(value - first - second) / scale
        found.coupling = max(found.coupling, coupling)
        # The mean over the units of the head, or over samples, whatever the task counts.
        weights = [[data.units_of(count, head) for count in units], [float(size) for _, size in halves]]
        means = [(first * w[0] + second * w[1]) / sum(w) for w in weights if sum(w)]
        if coupling > _IS_MEAN and any(abs(value - mean) / scale < near for mean in means):
            found.mean_heads.append(head)
    if found.coupling > COUPLED * found.epsilon and not found.mean_heads:
        found.meets_at = meeting_place(record.results, [part.results for part in records], [size for _, size in halves])
    found.without_labels = record.has_all(data.tensors(whole))
    if not found.mean_heads and record.is_uncoupled(records):
        comparison = _comparison(record, records)
        found.has_comparison = bool(comparison)
        if found.coupling > COUPLED * found.epsilon:
            # With labels, a loss that mixes samples in another way more often does so by mistake.
            found.compares_samples = comparison or ("as it has no labels" if found.without_labels else "")
    return found


def shrinking_heads(task: Task, model: nn.Module, batches: Sequence[Batch]) -> list[str]:
    """Heads whose loss per unit is much smaller for a batch than for its halves, as for a mean.

    This is for a loss that compares samples, whose sum and mean do not add up. With more samples to compare, the loss
    of a sample grows, for example from log(n) to log(2 n), and the mean over a batch is divided by twice as many units.

    Args:
        batches: a batch and its halves, of as many samples as possible.
    """
    with torch.no_grad():
        whole, *halves = [data.losses(task, model, batch) for batch, _ in batches]
    units_of_whole, units_of_halves = data.count_units(task, batches[:1]), data.count_units(task, batches[1:])
    found = []
    for head, loss in whole.items():
        one, two = data.units_of(units_of_whole, head), data.units_of(units_of_halves, head)
        loss_of_halves = sum(float(half[head]) for half in halves)
        if (
            len(halves) == 2
            and one
            and two
            and loss_of_halves > 0
            and 0 < float(loss) / one < _SHRINKS * loss_of_halves / two
        ):
            found.append(head)
    return found


class _Record:
    """The inputs and outputs of a model in one pass over a batch, and the loss of the outputs."""

    def __init__(self, samples: int) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.comparing = ComparingOperations(samples)
        self.results = ResultRecorder()

    def has_all(self, tensors: Sequence[Tensor]) -> bool:
        """True if all of these tensors, or views of them, went into the model."""
        entered = {tensor.untyped_storage().data_ptr() for tensor in self.inputs}
        return all(tensor.untyped_storage().data_ptr() in entered for tensor in tensors)

    def is_uncoupled(self, parts: Sequence[_Record]) -> bool:
        """True if there are outputs, and they are those of `parts` in order."""
        if not self.outputs or any(len(part.outputs) != len(self.outputs) for part in parts):
            return False
        for output, *of_parts in zip(self.outputs, *(part.outputs for part in parts), strict=True):
            if any(part.shape[1:] != output.shape[1:] for part in of_parts):
                return False
            joined = torch.cat(of_parts)
            if joined.shape != output.shape or not torch.allclose(joined, output, rtol=1e-5, atol=1e-6):
                return False
        return True


@contextlib.contextmanager
def _recorded(model: nn.Module, samples: int) -> Iterator[_Record]:
    """Inside, the outermost calls of the model's modules are recorded, and what a loss does between them.

    A loss may call parts of the model separately, or the model several times.
    """
    record, calls = _Record(samples), 0

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        if not calls:
            record.inputs.extend(data.tensors((args, kwargs)))
        calls += 1
        record.comparing.is_paused = record.results.is_paused = True

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls -= 1
        if not calls:
            found = [tensor.detach() for tensor in data.tensors(output)]
            record.outputs.extend(tensor for tensor in found if tensor.is_floating_point() and tensor.ndim)
            record.results.add("the model", data.tensors(output), "")
            record.comparing.is_paused = record.results.is_paused = False

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            # Before and after all hooks of a task.
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(record.comparing)
        stack.enter_context(record.results)
        yield record


def _comparison(whole: _Record, halves: Sequence[_Record]) -> str:
    """The operation with which a loss compares samples, and its place; empty if there is none."""
    of_halves = [set(half.comparing.found) for half in halves]
    common = (found for found in whole.comparing.found if all(found in of_half for of_half in of_halves))
    return next((f"with {name} at {place}" for name, place, _ in common), "")
