"""Is the loss of a batch the sum over its parts? If not, it is a mean, or samples influence each other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.data.randomness import restored_generators
from lockstep.core.task import Task
from lockstep_lab.verify.comparable_task import ComparableTask, sum_of_heads, to_float64
from lockstep_lab.verify.derivative import own_backwards
from lockstep_lab.verify.meeting_place import ResultRecorder, adds_up, divisor, meeting_place
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.repetition import unchanged_buffers
from lockstep_lab.verify.step_operations import CoarseOperations, ComparingOperations, RepeatedDraws

COUPLED = 1e3  # roundings; if the loss is further off, samples influence each other
_IS_MEAN = 1e-3  # relative difference below which a batch's loss is the mean over its halves, in coarse formats
_SHRINKS = 0.8  # of the loss per unit: a sum over samples with their negatives grows, a mean has about 0.6

_COMPARED_SAMPLES = 32  # for a loss that compares samples, and if samples are small
_FEW_NUMBERS = 4000  # in a batch of up to 8 samples

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
    coupled_heads: list[str] = field(default_factory=list)
    """Heads whose loss of a batch is not the sum over its halves."""
    divided_by: str = ""
    """The sum over the samples of a micro-batch that the loss was divided by, and its place: the loss is a mean."""
    in_collate: bool = False
    """True if numbers that `Task.collate` gives for a sample depend on the other samples."""
    adds_once: bool = False
    """True if a term of the loss is the same for a batch and for this batch twice, such as a mean."""
    by_statistics: str = ""
    """The module, head or operation that depends on statistics of the batch on purpose, as BatchNorm does."""

    @property
    def is_no_sum(self) -> bool:
        """True if the loss of a batch is not the sum over its samples, and no purpose of that is known."""
        intended = self.compares_samples or self.by_statistics
        return bool(self.mean_heads) or (self.coupling > COUPLED * self.epsilon and not intended)


class _Split:
    """The losses of a batch and of its two halves by head, with the same random numbers for each sample.

    Args:
        change: of a batch, with the record of an earlier pass over it.
        earlier: this split before the change.
    """

    def __init__(
        self, task: Task, model: nn.Module, batches: Sequence[Batch], change: Any = None, earlier: Any = None
    ) -> None:
        sizes, self.losses, self.records, self.failed = [size for _, size in batches], [], [], False
        self.draws_outside_torch = False
        starts, self.draws = (0, 0, *sizes[1:2]), RepeatedDraws(range(sizes[0]))
        for place, ((batch, size), start) in enumerate(zip(batches, starts, strict=False)):
            batch = change(batch, earlier.records[place]) if change else batch
            draws = RepeatedDraws(range(start, start + size), self.draws) if place else self.draws
            with _pass(model), _recorded(model, size) as record, draws:
                before = _states_outside_torch()
                self.losses.append({head: float(loss) for head, loss in data.losses(task, model, batch).items()})
                self.draws_outside_torch |= _states_outside_torch() != before
            self.records.append(record)
            self.failed |= draws.failed

    def by_head(self) -> dict[str, tuple[float, float, float]]:
        """The losses of the batch and of its halves."""
        whole, first, second = self.losses
        return {head: (loss, first[head], second[head]) for head, loss in whole.items()}

    @property
    def coupling(self) -> float:
        """The difference of the loss of the batch from the sum over its halves."""
        return sum(whole - first - second for whole, first, second in self.by_head().values())

    @property
    def is_independent(self) -> bool:
        """True if the outputs of the model for a sample do not depend on the other samples."""
        return self.records[0].is_uncoupled(self.records[1:])


@contextlib.contextmanager
def _pass(model: nn.Module) -> Iterator[None]:
    """Inside, a pass over a batch leaves no trace. All such passes begin with the same random numbers."""
    with restored_generators(next(model.parameters()).device), torch.no_grad(), unchanged_buffers(model):
        yield


def _states_outside_torch() -> Any:
    """The states of the generators of Python and NumPy."""
    state: Any = np.random.get_state()
    _, numbers, place, *_ = state
    return random.getstate(), numbers.tobytes(), place


def measure_coupling(task: Task, model: nn.Module, batches: Sequence[Batch], twice: Callable[[], Any]) -> Coupling:
    """Find out whether the loss of each head is a sum over samples, and make a backward pass.

    Args:
        task: with weights that no pass changes.
        batches: a batch and its halves. A single sample has one half.
        twice: makes the batch with all samples twice.
    """
    with CoarseOperations() as coarse:
        objective = sum_of_heads(data.losses(task, model, batches[0][0]))
        functions = list(own_backwards(objective))
        torch.autograd.backward(objective)
    found = Coupling(max(torch.finfo(objective.dtype).eps, coarse.epsilon), coarse.words, functions)
    split = _Split(task, model, batches)
    if len(batches) < 3 or split.failed:
        return found
    (whole, _), *halves = batches
    record, *records = split.records
    units = [data.count_units(task, [half]) for half in halves]
    near = min(_IS_MEAN, COUPLED * found.epsilon)  # a ratio over the batch is almost the mean of ratios
    for head, (value, first, second) in split.by_head().items():
        scale = max(abs(value), abs(first) + abs(second), 1e-30)
        coupling = abs(value - first - second) / scale
        found.coupling = max(found.coupling, coupling)
        found.coupled_heads.extend([head] if coupling > COUPLED * found.epsilon else [])
        # The mean over the units of the head, or over samples, whatever the task counts.
        weights = [[data.units_of(count, head) for count in units], [float(size) for _, size in halves]]
        means = [(first * w[0] + second * w[1]) / sum(w) for w in weights if sum(w)]
        if coupling > _IS_MEAN and any(abs(value - mean) / scale < near for mean in means):
            found.mean_heads.append(head)
    if found.coupled_heads and split.draws_outside_torch:  # perhaps other numbers for the samples of the second half
        return Coupling(found.epsilon, coarse.words, functions)
    found.without_labels = record.has_all(data.tensors(whole))
    if not found.mean_heads and split.is_independent:
        comparison = _comparison(record, records)
        found.has_comparison = bool(comparison)
        if found.coupled_heads:
            # With labels, a loss that mixes samples in another way more often does so by mistake.
            found.compares_samples = comparison or ("as it has no labels" if found.without_labels else "")
    if not found.coupled_heads or found.mean_heads:
        return found
    sizes = [size for _, size in halves]
    found.in_collate = _collate_mixes(batches, sizes)
    sums = [sum(split.losses[place].values()) for place in range(3)]
    found.divided_by = divisor(record.results, [one.results for one in records], sums, [batches[0][1], *sizes])
    if found.in_collate or found.divided_by:
        found.compares_samples = ""
        return found
    found.meets_at = _first_mixing(record, records, sizes)
    found.meets_at = found.meets_at or meeting_place(record.results, [one.results for one in records], sizes)
    if not found.has_comparison:
        with contextlib.suppress(Exception):  # a batch may have a fixed size
            _explain(found, split, task, model, batches, twice())
    return found


def _explain(
    found: Coupling, split: _Split, task: Task, model: nn.Module, batches: Sequence[Batch], twice: Any
) -> None:
    """Find out whether a coupled loss uses statistics of the batch, as BatchNorm does, or has a term that adds once.

    Twice the same samples have the same statistics, so a sum over samples then doubles. Such a loss is intended if
    samples are independent in evaluation mode, and if the labels have no effect on what couples them.
    """
    with _pass(model), RepeatedDraws([*range(batches[0][1])] * 2, split.draws):
        doubled = float(sum_of_heads(data.losses(task, model, twice))) - 2 * sum(split.losses[0].values())
    found.adds_once = abs(doubled - split.coupling) < 0.5 * abs(split.coupling)
    found.compares_samples = "" if found.adds_once else found.compares_samples
    model.eval()
    is_independent = _Split(task, model, batches).is_independent
    model.train()
    if abs(doubled) > 0.5 * abs(split.coupling) or not is_independent:
        return

    def unlabelled(batch: Any, record: _Record) -> Any:
        return data.mapped(batch, lambda one: one if record.has_all([one]) else torch.zeros_like(one))

    if split.is_independent:  # the loss itself mixes samples
        change = abs(_Split(task, model, batches, unlabelled, split).coupling - split.coupling)
        if change > 1e-3 * abs(split.coupling) + COUPLED * found.epsilon * sum(map(abs, split.losses[0].values())):
            return
    heads = ", ".join(map(repr, found.coupled_heads))
    of_head = f"the head {heads} of the loss" if len(found.coupled_heads) < len(split.losses[0]) else ""
    found.by_statistics, found.compares_samples = of_head or found.meets_at or "the loss", ""


def _collate_mixes(batches: Sequence[Batch], sizes: Sequence[int]) -> bool:
    """True if a batch has other numbers for its samples than its halves. Padding does not count."""
    whole, first, second = [[one for one in data.tensors(batch) if one.ndim] for batch, _ in batches]
    if not len(whole) == len(first) == len(second):
        return False
    for one, *of_halves in zip(whole, first, second, strict=True):
        rows = [len(each) for each in (one, *of_halves)]
        alike = all(each.shape[1:] == one.shape[1:] for each in of_halves)
        is_comparable = one.is_floating_point() and alike and rows == [sum(sizes), *sizes]
        if is_comparable and not torch.allclose(one, torch.cat(of_halves), rtol=1e-5, atol=1e-7, equal_nan=True):
            return True
    return False


def _first_mixing(whole: _Record, halves: Sequence[_Record], sizes: Sequence[int]) -> str:
    """The first module whose output for a sample depends on the other samples, with its buffers; empty if unknown.

    Its inputs do not depend on them: otherwise, the code that calls it has mixed the samples.
    """

    def mixes(tensors: Sequence[Tensor], *of_halves: Sequence[Tensor]) -> bool:
        is_complete = all(len(one) == len(tensors) for one in of_halves)
        return is_complete and not all(adds_up(*one, sizes=sizes) for one in zip(tensors, *of_halves, strict=True))

    for module in whole.modules:
        inputs, outputs = zip(*(one.modules.get(module, ((), ())) for one in (whole, *halves)), strict=True)
        if mixes(*outputs) and not mixes(*inputs):
            buffers = ", ".join(name for name, _ in module.named_buffers(recurse=False))
            own = whole.names[module]
            name = f"the {f'module {own}' if own else 'model'} ({type(module).__name__})"
            return f"{name}, by its buffers {buffers}," if buffers else name
    return ""


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


def halved(task: Task, samples: list[Any], device: torch.device, share: int = 2) -> list[Batch]:
    """A batch of all samples, and its two parts, split after one in `share` samples. A single sample has one part."""
    half = len(samples) // share
    batches = [(task.collate(part), len(part)) for part in (samples, samples[:half], samples[half:]) if part]
    return [(data.to_device(batch, device), size) for batch, size in batches]


def find_coupling(
    task: ComparableTask, model: nn.Module, batches: list[Batch], read: Callable[..., list[Any]]
) -> Coupling:
    """Find out how the loss of a batch differs from that of its halves, with more samples if eight may not show it.

    Args:
        read: up to `most` prepared samples.
    """

    def measured(share: int, most: int) -> tuple[Coupling, list[Batch]]:
        samples, device = read(most=most), next(model.parameters()).device

        def converted(samples: list[Any]) -> list[Batch]:  # so that the tensors of a batch are those in its loss
            parts = halved(task, samples, device, share)
            return [(to_float64(batch), size) for batch, size in parts] if task.changes.float64 else parts

        parts = converted(samples)
        return measure_coupling(task, model, parts, lambda: converted(samples * 2)[0][0]), parts

    found, _ = measured(2, 8)
    is_small = sum(tensor.numel() for tensor in data.tensors(batches[0][0])) <= _FEW_NUMBERS
    if found.has_comparison or (not found.coupled_heads and is_small):
        for share in (2, 4, 8):  # a split may show no coupling by chance, and so may few samples
            found, _ = measured(share, _COMPARED_SAMPLES)
            if found.compares_samples or not found.has_comparison:
                break
        if found.has_comparison and found.compares_samples:
            found.mean_heads = shrinking_heads(task, model, measured(2, _COMPARED_SAMPLES)[1])
    return found


class _Record:
    """The inputs and outputs of a model in one pass over a batch, and the loss of the outputs."""

    def __init__(self, samples: int) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.comparing = ComparingOperations(samples)
        self.results = ResultRecorder()
        self.names: dict[nn.Module, str] = {}
        self.modules: dict[nn.Module, tuple[list[Tensor], list[Tensor]]] = {}
        """The inputs and outputs of the first call of each module, inner modules first."""

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

    def numbers_in(values: Any) -> list[Tensor]:
        return [one.detach() for one in data.tensors(values) if one.is_floating_point() and one.ndim]

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        if not calls:
            record.inputs.extend(data.tensors((args, kwargs)))
        calls += 1
        record.comparing.is_paused = record.results.is_paused = True

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls -= 1
        found = numbers_in(output)
        record.modules.setdefault(module, (numbers_in(args), found))
        if not calls:
            record.outputs.extend(found)
            record.results.add("the model", data.tensors(output), "")
            record.comparing.is_paused = record.results.is_paused = False

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            record.names[module] = name
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
