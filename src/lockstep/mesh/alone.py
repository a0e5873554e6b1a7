"""The shard of a model that one rank of a tensor group holds, in one process: for planning a training.

What other ranks would send only has the right size: the results of the model are meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.mesh import plans, tokens
from lockstep.mesh.group import Alone, Note

_KEPT, _COPIED, _SUMMED = ("same", "same"), ("same", "added"), ("added", "same")
_WAYS = {
    "colwise": (0, _COPIED, _KEPT),
    "colwise_gather_output": (0, _COPIED, ("joined", "part")),
    "rowwise": (1, _KEPT, _SUMMED),
    "rowwise_split_input": (1, ("part", "joined"), _SUMMED),
    "embedding_rowwise": (0, _KEPT, _SUMMED),
}
"""By style: the dimension of the weight that is sharded, and the exchange of a layer's input and output: of the
activation in the forward pass, and of its gradient in the backward pass."""


def part_of(model: nn.Module, own: Mapping[str, str] | None, ranks: int, note: Note) -> list[str]:
    """Give the layers of `model` the parameters that one rank of a tensor group holds. They have `cut_over`: `ranks`.

    Args:
        own: what `Task.tensor_plan` returned.
        note: called for each collective of the group in forward and backward passes.

    Returns:
        lines about layers that stay whole.

    Raises:
        UsageError: see `plans.plan_of`.
    """
    plan = plans.plan_of(model, own, ranks)
    group = Alone(ranks, note)
    exchanged: Any = _Exchanged.apply
    for name, style in plan.styles.items():
        if style not in plans.CUT:
            continue
        module, (dimension, before, after) = model.get_submodule(name), _WAYS[style]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if key == "weight" or dimension == 0:  # the bias of a `rowwise` layer is whole
                part = nn.Parameter(parameter.detach().chunk(ranks, dimension)[0].clone(), parameter.requires_grad)
                vars(part).update(vars(parameter) | {"cut_over": ranks})
                setattr(module, key, part)

        def enter(each: Any, given: Any, ways: Any = before) -> Any:
            if isinstance(each, nn.Embedding):  # words of other ranks map to words of this one
                return (given[0] % len(each.weight), *given[1:])
            return (exchanged(given[0], ways, ranks, note), *given[1:])

        def leave(_: Any, __: Any, output: Tensor, ways: Any = after) -> Any:
            return exchanged(output, ways, ranks, note)

        if name in plan.inside:
            continue
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        if style == plans.WORDS:
            vars(module)["tensor_group"] = group
    for one, other in plan.tied:
        model.get_submodule(one).weight = model.get_submodule(other).weight
    tokens.arrange(model, plan, group)
    return plan.notes


def _after(way: str, tensor: Tensor, ranks: int, note: Note) -> Tensor:
    """What a rank has after an exchange."""
    if way == "added":
        note("all_reduce", tensor.nbytes)
        return tensor.clone()
    if way == "joined":
        note("all_gather", tensor.nbytes * ranks)
        return torch.cat([tensor] * ranks, dim=-1)
    return tensor.view_as(tensor) if way == "same" else tensor.chunk(ranks, dim=-1)[0].contiguous()


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ways: tuple[str, str], *others: Any) -> Any:
        ctx.way, ctx.others = ways[1], others
        return _after(ways[0], tensor, *others)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _after(ctx.way, grad, *ctx.others), None, None, None
