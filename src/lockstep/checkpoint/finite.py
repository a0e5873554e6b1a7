"""What is saved is finite: a checkpoint with NaN in it would fail every later start."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.distributed.sharded_tensor import local
from lockstep.distributed.world import World
from lockstep.errors import TrainingError

Grades = dict[str, int]  # by tensor; one that is not named is to be finite

FINITE, INFINITE, NAN = 0, 1, 2
_WORDS = ("finite numbers", "infinite numbers", "NaN")


def grade(tensor: Tensor) -> int:
    """What the worst element is: FINITE, INFINITE or NAN. One pass over numbers of 16 or more bits, without a copy."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return FINITE
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    low, high = torch.aminmax(real.float() if real.element_size() == 1 else real)  # float8 has no minimum
    if math.isfinite(low) and math.isfinite(high):
        return FINITE
    return NAN if math.isnan(low) else INFINITE


def faults(tensors: Mapping[str, Tensor], allowed: Mapping[str, int]) -> Grades:
    """The tensors that hold worse than `allowed` on this rank, and what they hold."""
    found = {name: grade(local(tensor)) for name, tensor in tensors.items()}
    return {name: worst for name, worst in found.items() if worst > allowed.get(name, FINITE)}


def at_start(model: nn.Module, tensors: Mapping[str, Tensor], world: World) -> Grades:
    """What tensors may hold in checkpoints, because they hold it before training begins: a mask holds infinity.

    Args:
        tensors: what checkpoints will hold on this rank, as `state.capture` names it.

    Raises:
        TrainingError: on every rank, where a parameter that is to be trained is not finite on some rank.
    """
    mine = faults(tensors, {})
    trained = {f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrong = {name: worst for name, worst in mine.items() if name in trained}
    for rank, found in enumerate(world.broadcast(world.gather(wrong))):
        if found:
            raise TrainingError(
                f"{describe(found)} before the first step",
                where=f"rank {rank}",
                remedy="repair Task.model or train.init_from; where the run was resumed, start anew with --fresh",
            )
    frozen = [name.removeprefix("model.") for name in mine if name.startswith("model.")]
    return mine | {f"ema.{name}": NAN for name in frozen}  # an average of infinite numbers is NaN


def refusal(found: Grades, rank: int, step: int, kept: int | None) -> TrainingError:
    """The error for a state that was not saved.

    Args:
        found: what is wrong on `rank`. step: of the state. kept: step of the newest checkpoint; None: there is none.
    """
    stays = f"the checkpoint of step {kept} is kept" if kept is not None else "no checkpoint was saved before"
    return TrainingError(
        f"{describe(found)}, so this state was not saved; {stays}",
        where=f"step {step}, rank {rank}",
        remedy="look for 0/0, sqrt or log at 0 in the loss; else lower optim.lr, set optim.clip_norm, lengthen schedule.warmup_steps, or use precision=fp32",
    )


def describe(found: Grades) -> str:
    """The first of these tensors, what it holds, and how many more there are."""
    name, worst = next(iter(found.items()))
    more = f", and {len(found) - 1} more tensors are not finite" if len(found) > 1 else ""
    return f"{name} holds {_WORDS[worst]}{more}"
