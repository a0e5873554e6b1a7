"""How far two trainings are from each other, and how far rounding alone may take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint import files, store
from lockstep.checkpoint.store import Checkpoint

_SAFETY = 30.0
_TOO_VAGUE = 1e-2  # beyond, a training that rounding alone moves so far cannot tell a small fault from rounding


@dataclass(frozen=True)
class Difference:
    """weights: 2-norm of the difference of the tensor that differs most, relative to all that training moved. worst: its name.
    losses: largest difference of the two curves, relative to their largest value. missing: tensors that only one of the two has."""

    weights: float
    worst: str
    losses: float
    missing: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """Of weights and losses."""
        return math.inf if self.missing else max(self.weights, self.losses)


def last_checkpoint(folder: str | Path) -> Checkpoint | None:
    """The newest one of a run directory."""
    found = store.listed(Path(folder) / "checkpoints")
    return max(found, key=lambda one: one.step, default=None)


def difference(
    one: Checkpoint,
    other: Checkpoint,
    parameters: Sequence[str],
    moved: float,
    losses: Sequence[float],
    other_losses: Sequence[float],
) -> Difference:
    """Between the parameters of two checkpoints, tensor by tensor. Buffers may count forward passes, which differ by nature."""
    names = {f"model.{name}" for name in parameters}
    missing = tuple(sorted(names - (one.index.keys() & other.index.keys())))
    apart: dict[str, float] = {}
    both = dict.fromkeys(names - set(missing))
    for name, tensor in files.read(one.path, one.index, both):
        ((_, twin),) = files.read(other.path, other.index, {name: None})
        apart[name] = _apart(tensor, twin)
    worst = max(apart, key=lambda name: apart[name], default="")
    return Difference(
        apart.get(worst, 0.0) / (moved or 1.0),
        worst.removeprefix("model."),
        curve_difference(losses, other_losses),
        missing,
    )


def _apart(one: Tensor, other: Tensor) -> float:
    apart = float((one.double() - other.double()).norm())
    return apart if math.isfinite(apart) else math.inf


def curve_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference between two curves, relative to the largest value; infinite where they have other lengths."""
    if len(one) != len(other):
        return math.inf
    scale = max((abs(value) for value in (*one, *other)), default=1.0) or 1.0
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(apart, default=0.0) / scale if all(map(math.isfinite, apart)) else math.inf


def first_apart(one: Sequence[float], other: Sequence[float], bound: float) -> int | None:
    """The first place at which two curves differ by more than `bound`, relative to their largest value."""
    scale = max((abs(value) for value in (*one, *other) if math.isfinite(value)), default=1.0) or 1.0
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if not abs(a - b) <= bound * scale), None
    )


def differing(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Names of what is not bit for bit the same in two checkpoints: tensors, plain values, the step."""
    found = sorted(one.index.keys() ^ other.index.keys())
    both = dict.fromkeys(one.index.keys() & other.index.keys())
    for name, tensor in files.read(one.path, one.index, both):
        ((_, twin),) = files.read(other.path, other.index, {name: None})
        if tensor.dtype != twin.dtype or tensor.shape != twin.shape or not torch.equal(_bits(tensor), _bits(twin)):
            found.append(name)
    facts = [
        {key: one_of.manifest[key] for key in ("step", "skipped", "loss_scale")} | dict(one_of.values)
        for one_of in (one, other)
    ]
    return sorted(found) + sorted(
        key for key in facts[0].keys() | facts[1].keys() if facts[0].get(key) != facts[1].get(key)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def bound(noise: Difference, epsilon: float, steps: int) -> float:
    """The largest difference that rounding explains.

    noise: between two runs of the same training on one process that add their samples in another order: what rounding does to this
    very training, conditioned as it is, over its `steps`. A single such run may be lucky, so 30 times that passes, and at least
    what random rounding of each of the steps adds up to.
    """
    return max(_SAFETY * noise.largest, _SAFETY * epsilon * math.sqrt(steps))


def too_vague(limit: float) -> bool:
    """Whether `bound` is so large that a fault could hide in it."""
    return not limit <= _TOO_VAGUE
