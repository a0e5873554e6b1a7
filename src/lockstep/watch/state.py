"""The state that replicas must share: weights, optimizer state and averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.parallel import sharded_tensor
from lockstep.core.parallel.world import World
from lockstep.core.step import TrainState
from lockstep.parts.digest import fold
from lockstep.parts.replicas import tensors_of_state

TURNS = 2
"""This many checks cover everything."""


def state_tensors(state: TrainState) -> dict[str, Tensor]:
    """The tensors that replicas share, by name; of sharded tensors, this rank's rows.

    Buffers are left out: every rank gets those of rank 0 before each step.
    """
    model = state.strategy.unwrapped.model
    kinds = ("model", "buffer")
    buffers = {f"{kind}.{name}" for kind in kinds for name, _ in model.named_buffers(remove_duplicate=False)}
    names = {f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    found = tensors_of_state(state)
    kept = {n: t for n, t in found.items() if n in names or (n not in buffers and not n.startswith("model."))}
    return {name: sharded_tensor.local(tensor.detach()) for name, tensor in sorted(kept.items())}


def in_turn(tensors: Mapping[str, Tensor], check: int) -> list[str]:
    """The names of those that a check examines: about half of the elements, and the others at the next check."""
    return sorted(tensors, key=lambda name: (-tensors[name].numel(), name))[check % TURNS :: TURNS]


def state_digest(state: TrainState, check: int | None = None) -> Tensor:
    """The digest of all these tensors, or of those that a check examines: two int64."""
    tensors = state_tensors(state)
    tensors = tensors if check is None else {name: tensors[name] for name in in_turn(tensors, check)}
    here = {name: tensor for name, tensor in tensors.items() if tensor.device.type == state.world.device.type}
    apart = {name: tensor for name, tensor in tensors.items() if name not in here}
    total = fold(here)
    return total + 3 * fold(apart).to(total.device) if apart else total


def of_all(world: World, value: Any) -> list[Any]:
    """The `value` of every rank, on every rank. Any picklable object."""
    found: list[Any] = world.broadcast(world.gather(value))
    return found


def gathered(world: World, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank, on every rank: equally many."""
    if world.size == 1:
        return [list(numbers)]
    vector = torch.tensor(numbers, dtype=torch.int64, device=world.device)
    rows: list[list[int]] = torch.stack(world.gather_tensors(vector)).tolist()
    return rows
