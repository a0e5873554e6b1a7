"""The part of a model that one rank of a tensor group holds, in one process: for a plan of a training.

What other ranks would send has the right size, and stands for itself: the results of the model mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.mesh import plans

_DIMENSIONS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1, "embedding_rowwise": 0}
"""The dimension of a weight that is cut, by style. Biases are cut where the weight is cut by rows."""


def part_of(model: nn.Module, own: Mapping[str, str] | None, ranks: int, note: Callable[[str, int], None]) -> list[str]:
    """Give the layers of `model` the parameters that one rank of a tensor group holds. They have `cut_over`: `ranks`.

    Args:
        own: what `Task.tensor_plan` returned.
        note: called for each collective of the group in forward and backward passes, with its name (`all_reduce`,
            `all_gather`) and the bytes of the whole tensor that each rank has afterwards.

    Returns:
        lines about layers that stay whole.

    Raises:
        UsageError: as `plans.plan_of`.
    """

    def same(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    def added(tensor: Tensor) -> Tensor:
        note("all_reduce", tensor.nbytes)
        return tensor.clone()

    def joined(tensor: Tensor) -> Tensor:
        note("all_gather", tensor.nbytes * ranks)
        return torch.cat([tensor] * ranks, dim=-1)

    def own_part(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, dim=-1)[0].contiguous()

    exchanged: Any = _Exchanged.apply

    def exchange(module: nn.Module, inputs: Any, there: Any, back: Any) -> Any:
        if isinstance(module, nn.Embedding):
            return (inputs[0] % module.weight.shape[0], *inputs[1:])
        return (exchanged(inputs[0], there, back), *inputs[1:])

    before = {
        "colwise": (same, added),
        "colwise_gather_output": (same, added),
        "rowwise_split_input": (own_part, joined),
        "embedding_rowwise": (same, same),  # see `exchange`
    }
    after = dict.fromkeys(("rowwise", "rowwise_split_input", "embedding_rowwise"), (added, same))
    after["colwise_gather_output"] = (joined, own_part)
    plan = plans.plan_of(model, own, ranks)
    for name, style in plan.styles.items():
        if style == plans.SUMMED:
            continue
        module = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if key == "weight" or _DIMENSIONS[style] == 0:
                part = parameter.detach().chunk(ranks, dim=_DIMENSIONS[style])[0].clone()
                setattr(module, key, nn.Parameter(part, parameter.requires_grad))
                vars(getattr(module, key)).update(vars(parameter) | {"cut_over": ranks})
        if style in before:
            module.register_forward_pre_hook(lambda each, given, how=before[style]: exchange(each, given, *how))
        if style in after:
            module.register_forward_hook(lambda _, __, output, how=after[style]: exchanged(output, *how))
    return plan.notes


class _Exchanged(torch.autograd.Function):
    """What a rank has of an activation after the forward pass of an exchange, and of its gradient after the backward
    pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Any, back: Any) -> Any:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None
