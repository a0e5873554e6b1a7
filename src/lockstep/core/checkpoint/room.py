"""The size that a checkpoint will have, before the first is written."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.core import optimizer_class
from lockstep.core.build import Run

_SIDE = 4
_IN_ONE_PIECE = ("fused", "foreach", "capturable", "differentiable")


def estimated_bytes(run: Run) -> int:
    """About how many bytes a checkpoint of a new run has: those of its tensors. All ranks call it.

    They are those of model, optimizer and averages, whole if they are sharded. The optimizer has no state before its
    first update. So an optimizer of its class makes an update of a small parameter, and the state of all parameters is
    taken to be in the same proportion.
    """
    model, state = run.model, run.state
    held = sum(_bytes(tensor) for tensor in model.state_dict().values() if isinstance(tensor, Tensor))
    held += sum(_bytes(tensor) for tensor in (state.averages.tensors.values() if state.averages else ()))
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return held + round(_share_of_state(state.optimizer) * trained)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _share_of_state(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of the optimizer's state by the bytes of its parameter. The largest share, of several optimizers."""
    shares = [0.0]
    for member in optimizer_class.members(optimizer):
        parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE))
        parameter.grad = torch.zeros_like(parameter)
        given = {key: value for key, value in optimizer_class.options(member).items() if key not in _IN_ONE_PIECE}
        trial = optimizer_class.like(member, [parameter], given)
        if trial is not None:
            trial.step(lambda: 0.0)
            slots = [slot for slot in trial.state[parameter].values() if isinstance(slot, Tensor)]
            shares.append(sum(_bytes(slot) for slot in slots if slot.shape == parameter.shape) / _bytes(parameter))
    return max(shares)
