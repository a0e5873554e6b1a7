"""The units of a mean: what a batch's loss is a mean over, found by trying a few samples in several parts.

A mean over n units of a batch is, for every cut of the batch into parts, the mean of the parts' means with the weights
n1, n2. A mean over other units is not, unless all samples have equally many.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.core.errors import DataError
from lockstep.core.foreign_task import refused

IGNORED = -100
"""The label that torch's cross_entropy leaves out."""
_MOST = 16  # samples that are tried
_NEAR = 64  # rounding errors of a mean
_LARGEST_MASK_DTYPE = (torch.bool, torch.uint8, torch.int32, torch.int64)

Path = tuple[Any, ...]


class Given(NamedTuple):
    """A batch of the foreign code, and what is known of it."""

    batch: Any
    samples: int
    purpose: str
    """`train`, `validate` or `predict`."""
    is_empty: bool = False
    """True if it has no unit: its mean is 0/0."""


@dataclass(frozen=True)
class Unit:
    """What a mean is a mean over."""

    kind: str = "samples"
    """`samples`; `labels`: those that are not -100; `shifted`: the same without the first of each row, as causal models
    count; `ones`: of a mask."""
    path: Path = ()
    """Where the tensor is in the batch."""

    def count(self, given: Given) -> Any:
        """The number of units of a batch: an int, or a tensor on the batch's device."""
        if self.kind == "samples":
            return given.samples
        found = given.batch
        for key in self.path:
            found = found[key]
        if self.kind == "ones":
            return (found != 0).sum()
        return ((found[..., 1:] if self.kind == "shifted" else found) != IGNORED).sum()

    def filled(self, given: Given) -> Any:
        """A batch without units as one whose mean is finite, to be multiplied by zero: all ranks make equal passes."""
        return _replaced(given.batch, self.path, lambda found: torch.full_like(found, self.kind == "ones"))

    def __str__(self) -> str:
        place = "".join(f"[{key!r}]" for key in self.path)
        after = " after the first of each row" if self.kind == "shifted" else ""
        of = {"ones": f"the ones of batch{place}"}.get(
            self.kind, f"the labels of batch{place} that are not -100{after}"
        )
        return "samples" if self.kind == "samples" else of


@dataclass(frozen=True)
class OwnUnit:
    """Units that the user counts."""

    function: Callable[[Any], Any]
    kind: str = "own"

    def count(self, given: Given) -> Any:
        """See `Unit.count`."""
        return self.function(given.batch)

    def filled(self, given: Given) -> Any:
        """The batch as it is: where it has no unit, its mean must be finite."""
        return given.batch

    def __str__(self) -> str:
        return f"what {getattr(self.function, '__name__', 'weight')} counts"


SAMPLES = Unit()


def _replaced(value: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` with another tensor at `path`."""
    if not path:
        return change(value)
    new = _replaced(value[path[0]], path[1:], change)
    if isinstance(value, tuple):
        items = [new if place == path[0] else item for place, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    clone = copy.copy(value)
    clone[path[0]] = new
    return clone


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in dicts, lists and tuples, with the keys that lead to them."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        for key in list(value.keys()):
            yield from tensors(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from tensors(item, (*path, place))


def candidates(batch: Any) -> list[Unit]:
    """The units that the loss of such batches may have, the most likely first."""
    found = [SAMPLES]
    for path, tensor in tensors(batch):
        if tensor.dtype == torch.int64:
            found.append(Unit("labels", path))
            found += [Unit("shifted", path)] if tensor.ndim > 1 and tensor.shape[-1] > 1 else []
        if tensor.dtype in _LARGEST_MASK_DTYPE and bool(((tensor == 0) | (tensor == 1)).all()):
            found.append(Unit("ones", path))
    # Labels are named so; an attention mask often has as many ones.
    return sorted(found, key=lambda unit: (unit.kind != "samples", "label" not in str(unit.path[-1:]).lower()))


def cuts(count: int) -> list[int]:
    """Where a batch of `count` samples is cut in two, once for each trial."""
    return sorted({1, count // 2, count - 1} - {0, count})


def spread(length: int) -> list[int]:
    """Some indices of a data set of this length, evenly spread."""
    count = min(_MOST, length)
    return [number * length // count for number in range(count)]


class Trial(NamedTuple):
    """Values of a batch and of its parts, by name."""

    whole: tuple[Given, Mapping[str, float]]
    parts: Sequence[tuple[tuple[Given, Mapping[str, float]], tuple[Given, Mapping[str, float]]]]


SCALES = (1.0, 8.0, 64.0)
"""Factors of the weights in trials. In a new model all losses are nearly equal, and a mean over anything is the same
number."""


@contextlib.contextmanager
def scaled(module: torch.nn.Module, factor: float) -> Iterator[None]:
    """Within, the matrices of a module are `factor` times as large, so that the losses of its samples differ more."""
    kept = [
        (p, p.detach().clone()) for p in module.parameters() if factor != 1 and p.ndim > 1 and p.is_floating_point()
    ]
    for parameter, _ in kept:
        parameter.mul_(factor)
    try:
        yield
    finally:
        for parameter, before in kept:
            parameter.copy_(before)


class Rounding(TorchFunctionMode):
    """Inside, the floating-point formats of all results are looked at: code may compute in a coarser one than that of
    its weights, as norms of transformers do."""

    near = _NEAR * torch.finfo(torch.float64).eps
    """What a mean may be off, in relation to its size: by the coarsest format so far. Half precision counts as single:
    a batch and its parts mostly round alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(tensor.is_floating_point() and tensor.itemsize < 8 for _, tensor in tensors(found)):
            self.near = _NEAR * torch.finfo(torch.float32).eps
        return found


class Fits:
    """The units that the values of all trials so far are means over, by name of the value."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Unit]] = {}

    def add(self, trial: Trial, *, near: float) -> None:
        """Leave out what does not fit a trial. A value that is not finite tells nothing."""
        for name in trial.whole[1]:
            if all(math.isfinite(found.get(name, 0.0)) for _, found in _all(trial)):
                known = self.by_name.get(name, candidates(trial.whole[0].batch))
                self.by_name[name] = [unit for unit in known if _fits(trial, name, unit, near)]

    def unit(self, name: str) -> Unit | None:
        """The unit. None: the value is a mean over none that is known."""
        return next(iter(self.by_name.get(name, ())), None)

    def is_open(self, name: str, trial: Trial) -> bool:
        """True if several units fit that count differently."""
        counts = [[float(unit.count(given)) for given, _ in _all(trial)] for unit in self.by_name.get(name, ())]
        return any(
            abs(a * other[0] - b * counts[0][0]) > 1e-6
            for other in counts
            for a, b in zip(counts[0], other, strict=True)
        )

    def __str__(self) -> str:
        return " or ".join(map(str, self.by_name.get("", ())))


def _all(trial: Trial) -> list[tuple[Given, Mapping[str, float]]]:
    return [trial.whole, *(part for parts in trial.parts for part in parts)]


def _fits(trial: Trial, name: str, unit: Unit, near: float) -> bool:
    whole = trial.whole[1][name]
    for parts in trial.parts:
        counts = [float(unit.count(given)) for given, _ in parts]
        counted = [(count, found.get(name, 0.0)) for count, (_, found) in zip(counts, parts, strict=True) if count]
        if not counted:
            return False
        mean = sum(count * value for count, value in counted) / sum(counts)
        if not abs(whole - mean) <= near * max(abs(whole), *(abs(value) for _, value in counted)):
            return False
    return True


def settled(module: torch.nn.Module, trial: Callable[[], Trial], rounding: Rounding) -> tuple[Fits, Trial]:
    """Make trials of a module with larger and larger weights, until one unit is left. What fits, and the last trial."""
    fits = Fits()
    for factor in SCALES:
        with scaled(module, factor):
            last = trial()
        fits.add(last, near=rounding.near)
        if not any(fits.is_open(name, last) for name in last.whole[1]):
            break
    return fits, last


def with_ignored(batch: Any) -> set[Path]:
    """Where tensors of whole numbers in a batch have -100."""
    return {path for path, one in tensors(batch) if one.dtype == torch.int64 and bool((one == IGNORED).any())}


def of_loss(fits: Fits, last: Trial, where: str, *, near: float) -> Unit:
    """The unit of the loss.

    Args:
        last: the last trial.
        where: the line of the step, for errors.

    Raises:
        UsageError: several units fit, or none does.
    """
    count, ask = last.whole[0].samples, "give weight=, a function from a batch to the number of its units"
    if fits.is_open("", last):
        what = f"the losses of {count} samples do not tell whether the loss is a mean over {fits}"
        raise refused(what, where, ask)
    unit = fits.unit("")
    whole, sums = last.whole[1][""], [one[""] + other[""] for (_, one), (_, other) in last.parts]
    if unit is None and whole and all(abs(whole - parts) <= near * abs(whole) for parts in sums):
        raise refused("the loss is a sum over samples, and not a mean", where, "return the mean")
    if unit is None:
        raise refused(
            "the loss is no mean over samples, over labels that are not -100, or over the ones of a mask: it is not "
            "known what a global batch that is cut in parts must divide by",
            where,
            f"{ask}, from its labels alone; or weight='samples' where the loss draws random numbers, and is a mean "
            "over samples; on the command line task.weight=samples",
        )
    return unit


def check_no_ignored(given: Given, unit: Any, known: Collection[Path], where: str) -> None:
    """Where the unit is the sample because all tried samples had all labels: a batch that lacks labels is an error.

    Args:
        known: where samples that were tried had -100: with these, the loss was a mean over samples.

    Raises:
        DataError: another tensor of whole numbers has -100.
    """
    for path in sorted(with_ignored(given.batch) - {*known}, key=str) if unit == SAMPLES else ():
        place = "".join(f"[{key!r}]" for key in path)
        raise DataError(
            f"batch{place} has the number -100, the label that losses leave out, and no sample that was tried had it "
            "there: so it is not known whether the loss is a mean over samples or over labels",
            where=where,
            remedy="give weight=, a function from a batch to its number of labels, or weight='samples'",
        )


def sliced(given: Given, first: int, last: int) -> Given:
    """The samples `first` to `last` of a batch: a mapping of tensors with the samples along the first dimension."""
    batch = {
        key: value[first:last] if hasattr(value, "__len__") and len(value) == given.samples else value
        for key, value in given.batch.items()
    }
    return Given(batch, last - first, given.purpose)
