"""Checks that a state is finite before it is saved. Every start from a checkpoint with NaN would fail."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.core.errors import TrainingError, number_of
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.world import World

Grades = dict[str, int]  # by tensor name; a tensor that is not named must be finite

FINITE, INFINITE, NAN = 0, 1, 2
_WORDS = ("finite numbers", "infinite numbers", "NaN")


def grade(tensor: Tensor) -> int:
    """The grade of the worst element: FINITE, INFINITE or NAN. Reads the tensor once, and copies float8 only."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return FINITE
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    low, high = torch.aminmax(real.float() if real.element_size() == 1 else real)  # float8 has no minimum
    if math.isfinite(low) and math.isfinite(high):
        return FINITE
    return NAN if math.isnan(low) else INFINITE


def faults(tensors: Mapping[str, Tensor], allowed: Mapping[str, int]) -> Grades:
    """The tensors whose grade on this rank is worse than `allowed`, with their grade."""
    grades = {name: grade(local(tensor)) for name, tensor in tensors.items()}
    return {name: worst for name, worst in grades.items() if worst > allowed.get(name, FINITE)}


def at_start(model: nn.Module, tensors: Mapping[str, Tensor], world: World) -> Grades:
    """The tensors that need not be finite in checkpoints, because they are not before the training, such as masks.

    Args:
        tensors: the tensors of a checkpoint on this rank, with the names of `state.capture`.

    Returns:
        the worst grade that each of them may have.

    Raises:
        TrainingError: on every rank, if a trainable parameter is not finite on any rank.
    """
    mine = faults(tensors, {})
    trained = {f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrong = {name: worst for name, worst in mine.items() if name in trained}
    for rank, grades in enumerate(world.broadcast(world.gather(wrong))):
        if grades:
            raise TrainingError(
                f"{describe(grades)} before the first step",
                where=f"rank {rank}",
                remedy="repair Task.model or train.init_from; if the run was resumed, start again with --fresh",
            )
    return mine


def refusal(grades: Grades, rank: int, step: int, kept: int | None) -> TrainingError:
    """The error for a state that was not saved.

    Args:
        grades: the tensors that are not finite on `rank`.
        step: step of the state.
        kept: step of the newest checkpoint; None: there is no checkpoint.
    """
    stays = f"the checkpoint of step {kept} is kept" if kept is not None else "no checkpoint was saved before"
    return TrainingError(
        f"{describe(grades)}, so this state was not saved; {stays}",
        where=f"step {step}, rank {rank}",
        remedy="look for 0/0, sqrt or log at 0 in the loss; else lower optim.lr, set optim.clip_norm, "
        "lengthen schedule.warmup_steps, or use precision=fp32",
    )


def describe(grades: Grades) -> str:
    """Text on the first of these tensors, what it holds, and how many more tensors there are."""
    name, worst = next(iter(grades.items()))
    more = f", and {number_of(len(grades) - 1, 'more tensor', 'is', 'are')} not finite" if len(grades) > 1 else ""
    return f"{name} holds {_WORDS[worst]}{more}"
