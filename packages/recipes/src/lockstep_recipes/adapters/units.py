"""The units of a mean: find out what a batch's loss is averaged over, by splitting a few samples in several ways.

However a batch is split, its mean over units is the mean of the shards' means, weighted by the number of units in each
shard (n1, n2). That does not hold for any other unit, unless all samples have the same number of it.
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
"""The label that torch's cross_entropy ignores."""
_MOST = 16  # samples that are tried
_NEAR = 64  # rounding errors of a mean
_LARGEST_MASK_DTYPE = (torch.bool, torch.uint8, torch.int32, torch.int64)

Path = tuple[Any, ...]


class Given(NamedTuple):
    """A batch of the adapted code, and what is known about it."""

    batch: Any
    samples: int
    purpose: str
    """`train`, `validate` or `predict`."""
    is_empty: bool = False
    """True if it contains no units: its mean is 0/0."""


@dataclass(frozen=True)
class Unit:
    """What a mean is averaged over."""

    kind: str = "samples"
    """`samples`; `labels`: labels that are not -100; `shifted`: the same without the first label of each row, as causal
    models count; `ones`: the ones of a mask."""
    path: Path = ()
    """The path of the tensor in the batch."""

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
        """Change a batch without units so that its mean is finite. The mean is then multiplied by zero: all ranks do
        the same passes."""
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
        """The batch unchanged: if it contains no units, its mean must be finite anyway."""
        return given.batch

    def __str__(self) -> str:
        return f"what {getattr(self.function, '__name__', 'weight')} counts"


SAMPLES = Unit()


def _replaced(value: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` with the tensor at `path` replaced."""
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
    """The possible units of the loss for such batches, most likely first."""
    found = [SAMPLES]
    for path, tensor in tensors(batch):
        if tensor.dtype == torch.int64:
            found.append(Unit("labels", path))
            found += [Unit("shifted", path)] if tensor.ndim > 1 and tensor.shape[-1] > 1 else []
        if tensor.dtype in _LARGEST_MASK_DTYPE and bool(((tensor == 0) | (tensor == 1)).all()):
            found.append(Unit("ones", path))
    # Labels usually have this name; an attention mask often has the same number of ones.
    return sorted(found, key=lambda unit: (unit.kind != "samples", "label" not in str(unit.path[-1:]).lower()))


def cuts(count: int) -> list[int]:
    """The index at which each trial splits a batch of `count` samples in two."""
    return sorted({1, count // 2, count - 1} - {0, count})


def spread(length: int) -> list[int]:
    """Evenly spaced indices of a data set of this length."""
    count = min(_MOST, length)
    return [number * length // count for number in range(count)]


class HalvesTrial(NamedTuple):
    """Values of a batch and of its two halves, by name."""

    whole: tuple[Given, Mapping[str, float]]
    parts: Sequence[tuple[tuple[Given, Mapping[str, float]], tuple[Given, Mapping[str, float]]]]


SCALES = (1.0, 8.0, 64.0)
"""Factors of the weights in trials. In a new model all losses are nearly equal, so means over any unit are the same."""


@contextlib.contextmanager
def scaled(module: torch.nn.Module, factor: float) -> Iterator[None]:
    """Within this context, the matrices of a module are multiplied by `factor`, so that the losses of its samples
    differ more."""
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
    """Within this context, the floating-point formats of all results are recorded: code may compute in a coarser format
    than that of its weights, as norms in transformers do."""

    near = _NEAR * torch.finfo(torch.float64).eps
    """The relative tolerance of a mean, from the coarsest format so far. Half precision counts as single: a batch and
    its halves mostly round the same way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(tensor.is_floating_point() and tensor.itemsize < 8 for _, tensor in tensors(found)):
            self.near = _NEAR * torch.finfo(torch.float32).eps
        return found


class Fits:
    """The units that fit the values of all trials so far, by name of the value."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Unit]] = {}

    def add(self, trial: HalvesTrial, *, near: float) -> None:
        """Remove the units that do not fit a trial. A value that is not finite is ignored."""
        for name in trial.whole[1]:
            if all(math.isfinite(found.get(name, 0.0)) for _, found in _all(trial)):
                known = self.by_name.get(name, candidates(trial.whole[0].batch))
                self.by_name[name] = [unit for unit in known if _fits(trial, name, unit, near)]

    def unit(self, name: str) -> Unit | None:
        """The unit. None: the value is not a mean over any known unit."""
        return next(iter(self.by_name.get(name, ())), None)

    def is_open(self, name: str, trial: HalvesTrial) -> bool:
        """True if several units with different counts fit."""
        counts = [[float(unit.count(given)) for given, _ in _all(trial)] for unit in self.by_name.get(name, ())]
        return any(
            abs(a * other[0] - b * counts[0][0]) > 1e-6
            for other in counts
            for a, b in zip(counts[0], other, strict=True)
        )

    def __str__(self) -> str:
        return " or ".join(map(str, self.by_name.get("", ())))


def _all(trial: HalvesTrial) -> list[tuple[Given, Mapping[str, float]]]:
    return [trial.whole, *(part for parts in trial.parts for part in parts)]


def _fits(trial: HalvesTrial, name: str, unit: Unit, near: float) -> bool:
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


def settled(module: torch.nn.Module, trial: Callable[[], HalvesTrial], rounding: Rounding) -> tuple[Fits, HalvesTrial]:
    """Try a module with larger and larger weights, until one unit remains. Returns what fits, and the last trial."""
    fits = Fits()
    for factor in SCALES:
        with scaled(module, factor):
            last = trial()
        fits.add(last, near=rounding.near)
        if not any(fits.is_open(name, last) for name in last.whole[1]):
            break
    return fits, last


def with_ignored(batch: Any) -> set[Path]:
    """The places of -100 in the integer tensors of a batch."""
    return {path for path, one in tensors(batch) if one.dtype == torch.int64 and bool((one == IGNORED).any())}


def of_loss(fits: Fits, last: HalvesTrial, where: str, *, near: float) -> Unit:
    """The unit of the loss.

    Args:
        last: the last trial.
        where: the line of the step, for errors.

    Raises:
        UsageError: several units fit, or none does.
    """
    count, ask = last.whole[0].samples, "give weight=, a function from a batch to the number of its units"
    if fits.is_open("", last):
        what = f"the losses of {count} samples do not show whether the loss is a mean over {fits}"
        raise refused(what, where, ask)
    unit = fits.unit("")
    whole, sums = last.whole[1][""], [one[""] + other[""] for (_, one), (_, other) in last.parts]
    if unit is None and whole and all(abs(whole - parts) <= near * abs(whole) for parts in sums):
        raise refused("the loss is a sum over samples, not a mean", where, "return the mean")
    if unit is None:
        raise refused(
            "the loss is not a mean over samples, over labels that are not -100, or over the ones of a mask, so the "
            "divisor for a global batch that is split into shards is unknown",
            where,
            f"{ask} that uses only its labels; if the loss draws random numbers and is a mean over samples, give "
            "weight='samples' (on the command line task.weight=samples)",
        )
    return unit


def check_no_ignored(given: Given, unit: Any, known: Collection[Path], where: str) -> None:
    """If the unit is the sample only because all tried samples had all labels, a batch that lacks labels is an error.

    Args:
        known: the places where tried samples had -100; with these, the loss was still a mean over samples.

    Raises:
        DataError: a different integer tensor contains -100.
    """
    for path in sorted(with_ignored(given.batch) - {*known}, key=str) if unit == SAMPLES else ():
        place = "".join(f"[{key!r}]" for key in path)
        raise DataError(
            f"batch{place} contains -100, the label that losses ignore, but no sample that was tried had it there, so "
            "it is unknown whether the loss is a mean over samples or over labels",
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
