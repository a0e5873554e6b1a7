"""The distance of two runs of a script, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lockstep_lab.verify.compare import SAFETY
from lockstep_lab.verify.reference.data import numbers
from lockstep_lab.verify.script_trial import FINAL, ScriptRecording

_MOST = 3


@dataclass
class Distance:
    """Between two runs."""

    losses: dict[int, float] = field(default_factory=dict)
    """By step, relative to the largest loss."""
    weights: dict[int, float] = field(default_factory=dict)
    """By step: of the parameter that differs most, relative to all that the training moved."""
    final: dict[str, float] = field(default_factory=dict)
    """Of the final weights, by parameter; those that differ most come first."""

    @property
    def largest(self) -> float:
        """Of all."""
        return max([*self.losses.values(), *self.weights.values(), *self.final.values()], default=0.0)

    def first_step(self, bound: float) -> int | None:
        """The first step, from 1, after which the runs differ by more than `bound`. None: they do not."""
        steps = sorted(self.losses.keys() | self.weights.keys())
        return next((s for s in steps if max(self.losses.get(s, 0.0), self.weights.get(s, 0.0)) > bound), None)

    def worst(self) -> str:
        """The names of the parameters that differ most."""
        return ", ".join(name for name, value in list(self.final.items())[:_MOST] if value)


@dataclass(frozen=True)
class Made:
    """A completed run."""

    folder: Path
    ranks: Sequence[ScriptRecording]

    @property
    def first(self) -> ScriptRecording:
        """Of rank 0."""
        return self.ranks[0]

    def weights(self, kind: str = "parameters") -> dict[str, Tensor]:
        """The final `parameters` or `buffers`."""
        loaded = torch.load(self.folder / FINAL, map_location="cpu", weights_only=True)
        found: dict[str, Tensor] = loaded[kind]
        return found


def distance(reference: Made, other: Made) -> Distance:
    """Compare two runs that began with the same weights. Numbers that are not finite are infinitely far apart."""
    found, one, two = Distance(), reference.first, other.first
    scale = max((abs(loss) for loss in (*one.losses.values(), *two.losses.values()) if math.isfinite(loss)), default=1)
    for step in sorted(one.losses.keys() | two.losses.keys()):
        if step > two.start:
            pair = one.losses.get(step, math.nan), two.losses.get(step, math.nan)
            found.losses[step] = _finite(abs(pair[0] - pair[1]) / (scale or 1.0)) if pair[0] != pair[1] else 0.0
    first, last = one.sketches[one.start], one.sketches[max(one.sketches)]
    moved = math.sqrt(sum(math.dist(first[name], last[name]) ** 2 for name in first)) or 1.0
    for step in sorted(one.sketches.keys() & two.sketches.keys()):
        mine, theirs = one.sketches[step], two.sketches[step]
        found.weights[step] = max((_apart(mine[name], theirs.get(name)) / moved for name in mine), default=0.0)
    weights, others = reference.weights(), other.weights()
    final = {name: _norm(weights[name], others.get(name)) / moved for name in weights}
    found.final = dict(sorted(final.items(), key=lambda item: -item[1]))
    return found


def bound(noise: Distance, epsilon: float, steps: int) -> float:
    """The largest distance that rounding explains; like `compare.rounding_bound`."""
    return max(SAFETY * noise.largest, SAFETY * epsilon * math.sqrt(steps))


def differing_bits(reference: Made, other: Made) -> list[str]:
    """The final parameters and buffers that are not bitwise equal."""
    names = []
    for kind in ("parameters", "buffers"):
        weights, others = reference.weights(kind), other.weights(kind)
        names += [name for name, value in weights.items() if not _same_bits(value, others.get(name))]
    return names


def first_step_of_bits(reference: ScriptRecording, other: ScriptRecording) -> int | None:
    """The first step, from 1, with a different loss or after which a parameter differs. 0: initial weights differ."""
    for step in sorted(other.sketches):
        if step in reference.sketches and not _same(reference.sketches[step], other.sketches[step]):
            return step
        if step in other.losses and repr(reference.losses.get(step)) != repr(other.losses[step]):
            return step
    return None


def names_at(reference: ScriptRecording, other: ScriptRecording, step: int) -> str:
    """The parameters that differ after a step, those that differ most first."""
    one, two = reference.sketches.get(step, {}), other.sketches.get(step, {})
    apart = {name: _apart(values, two.get(name)) for name, values in one.items()}
    return ", ".join([name for name in sorted(apart, key=lambda name: -apart[name]) if apart[name]][:_MOST])


def _same(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    return repr(one) == repr(other)


def _apart(one: Sequence[float], other: Sequence[float] | None) -> float:
    if other is None or len(one) != len(other):
        return math.inf
    return 0.0 if repr(one) == repr(other) else _finite(math.dist(one, other))


def _norm(one: Tensor, other: Tensor | None) -> float:
    if other is None or one.shape != other.shape:
        return math.inf
    return 0.0 if _same_bits(one, other) else _finite(float((numbers(one) - numbers(other)).norm()))


def _same_bits(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
