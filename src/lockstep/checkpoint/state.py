"""Model and optimizer in and out, by parameter name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.errors import CheckpointError

State = dict[str, Any]


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Tensors of the model and, per parameter name, of the optimizer. Learning rates are not state: schedules give them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots = {names[id(parameter)]: dict(slots) for parameter, slots in optimizer.state.items()}
    return {"model": model.state_dict(), "optimizer": slots}


def restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what `capture` returned, in place.

    Raises:
        CheckpointError: the checkpoint is of another model; names the tensors.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    if own != saved:
        differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        first = differing[0]
        raise CheckpointError(
            f"{len(differing)} tensors differ from the model's, first {first}: saved {saved.get(first)}, model {own.get(first)}",
            remedy="use the task and config that the checkpoint was made with, or start anew with --fresh",
        )
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    parameters = dict(model.named_parameters())
    for name, slots in state["optimizer"].items():
        parameter = parameters[name]
        # A step counter stays where the optimizer keeps it (the CPU); tensors shaped like the parameter go along with it.
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value for key, value in slots.items()
        }
