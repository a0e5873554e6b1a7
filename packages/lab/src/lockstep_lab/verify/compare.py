"""The distance of two trainings, and the distance that rounding alone explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.errors import number_of
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.reference.checkpoint import SavedState
from lockstep_lab.verify.reference.data import numbers

SAFETY = 30.0
"""Factor on measured rounding: a single measurement may be low by chance."""
_LARGEST_USEFUL_BOUND = 1e-2  # of what training moves; a larger bound could hide a small fault


@dataclass(frozen=True)
class TrainingDifference:
    """Between two trainings of the same model."""

    weights: float
    """2-norm of the difference of the tensor that differs most, relative to the 2-norm of all that training moved."""
    worst: str
    """Name of the tensor that differs most."""
    losses: float
    """Largest difference between the two curves, relative to their largest value."""
    missing: tuple[str, ...] = ()
    """Tensors that only one of the two checkpoints has."""

    @property
    def largest(self) -> float:
        """Of weights and losses; infinite if tensors are missing."""
        return math.inf if self.missing else max(self.weights, self.losses)


def difference(
    reference: SavedState,
    other: SavedState,
    parameters: Sequence[str],
    *,
    moved: float,
    losses: Sequence[float],
    other_losses: Sequence[float],
) -> TrainingDifference:
    """Compare the parameters of two checkpoints, tensor by tensor. Buffers are left out: they may count forward passes.

    Args:
        parameters: names of the model's parameters.
        moved: 2-norm of all that the reference training changed in them.
        losses: of the reference training, by step.
        other_losses: of the other training, by step.
    """
    names = {f"model.{name}" for name in parameters}
    missing = tuple(sorted(names - (reference.names & other.names)))
    norms: dict[str, float] = {}
    both = names - set(missing)
    for (name, tensor), (_, counterpart) in zip(reference.read(both), other.read(both), strict=True):
        norms[name] = _norm_of_difference(tensor, counterpart)
    worst = max(norms, key=lambda name: norms[name], default="")
    return TrainingDifference(
        weights=norms.get(worst, 0.0) / (moved or 1.0),
        worst=worst.removeprefix("model."),
        losses=curve_difference(losses, other_losses),
        missing=missing,
    )


def _norm_of_difference(first: Tensor, second: Tensor) -> float:
    norm = float((numbers(first) - numbers(second)).norm())
    return norm if math.isfinite(norm) else math.inf


def curve_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest difference between two curves, relative to their largest value; infinite if their lengths differ."""
    if len(first) != len(second):
        return math.inf
    scale = max((abs(value) for value in (*first, *second)), default=1.0) or 1.0
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    return max(differences, default=0.0) / scale if all(map(math.isfinite, differences)) else math.inf


def first_difference(first: Sequence[float], second: Sequence[float], bound: float) -> int | None:
    """The first index at which two curves differ by more than `bound`, relative to their largest finite value."""
    scale = max((abs(value) for value in (*first, *second) if math.isfinite(value)), default=1.0) or 1.0
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if not abs(a - b) <= bound * scale), None)


def first_difference_of_runs(first: list[Recording], again: list[Recording]) -> tuple[int, str] | None:
    """(step counted from 0, words) of the first difference between two trainings; None if they are the same."""
    losses, other_losses = first[0].losses_by_step, again[0].losses_by_step
    for step in sorted(losses.keys() | {step for recording in first for step in recording.batches}):
        for rank, (recording, other) in enumerate(zip(first, again, strict=True)):
            if recording.batches.get(step) != other.batches.get(step):
                return step, (
                    f"rank {rank} gets a different batch in step {step + 1} of a second run: reading or preparing a "
                    "sample draws random numbers that (seed, epoch, sample) do not determine, such as those of "
                    "numpy.random.default_rng()"
                )
        loss, other_loss = losses.get(step), other_losses.get(step)
        if loss != other_loss:
            return step, (
                f"the loss of step {step + 1} is {loss!r}, and {other_loss!r} in a second run, on the same batch"
            )
        for rank, (recording, other) in enumerate(zip(first, again, strict=True)):
            digests, other_digests = recording.digests.get(step + 1, {}), other.digests.get(step + 1, {})
            names = [name for name in digests if digests[name] != other_digests.get(name)]
            if names:
                return step, (
                    f"{names[0]} and {number_of(len(names) - 1, 'other tensor', 'differs', 'differ')} after step "
                    f"{step + 1} of a second run, "
                    f"on rank {rank}"
                )
    return None


def differing_names(first: SavedState, second: SavedState) -> list[str]:
    """Names of the tensors and plain values that are not bitwise equal in two checkpoints."""
    names = sorted(first.names ^ second.names)
    both = first.names & second.names
    for (name, tensor), (_, counterpart) in zip(first.read(both), second.read(both), strict=True):
        same_kind = tensor.dtype == counterpart.dtype and tensor.shape == counterpart.shape
        if not same_kind or not torch.equal(_bits(tensor), _bits(counterpart)):
            names.append(name)
    values, others = _plain_values(first), _plain_values(second)
    return sorted(names) + sorted(key for key in values.keys() | others.keys() if values.get(key) != others.get(key))


def _plain_values(checkpoint: SavedState) -> dict[str, object]:
    """The values of a checkpoint that are not tensors."""
    return {key: checkpoint.manifest[key] for key in ("step", "skipped", "loss_scale")} | dict(checkpoint.values)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def rounding_bound(noise: TrainingDifference, *, epsilon: float, steps: int) -> float:
    """The largest difference that rounding explains.

    Args:
        noise: between two runs of this training on one process that add their samples in a different order. It measures
        how this training amplifies rounding. A single run may be low by chance, so the bound is 30 times the noise.
        epsilon: relative rounding of the number format.
        steps: of the training. The bound is at least 30 roundings times the square root of the steps, because random
        roundings add up like that.
    """
    return max(SAFETY * noise.largest, SAFETY * epsilon * math.sqrt(steps))


def is_too_large(bound: float) -> bool:
    """True if a bound could hide a fault."""
    return not bound <= _LARGEST_USEFUL_BOUND
