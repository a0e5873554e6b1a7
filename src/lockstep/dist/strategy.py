"""How a model is spread over ranks: single and DDP, as functions. Sharding (FSDP2) fits into the same four."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist.precision import Precision
from lockstep.dist.world import World
from lockstep.errors import TrainingError, UsageError

StrategyName = Literal["single", "ddp"]
Losses = dict[str, Tensor]


class Forward(nn.Module):
    """From a batch to the task's loss sums, as one module.

    DDP wraps this, not the model: the task's loss may then call the model several times, or any of its methods and
    attributes, and means the same on one rank and on many.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor | Losses]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Losses:
        """Loss sums by head; a single loss is the head `loss`."""
        losses = self.loss(self.model, batch)
        return losses if isinstance(losses, dict) else {"loss": losses}


def wrap(forward: Forward, strategy: StrategyName, world: World, find_unused: bool = False) -> nn.Module:
    """Make `forward` synchronise its gradients as the mean over ranks, during the backward pass.

    On one rank there is nothing to synchronise, and `ddp` is `single`.

    Raises:
        UsageError: `single` on several ranks, which would train as many models.
    """
    if world.size == 1:
        return forward
    if strategy == "single":
        raise UsageError(f"{world.size} ranks would train {world.size} models", where="parallel.strategy=single", remedy="use ddp, or one rank")
    return DistributedDataParallel(forward, gradient_as_bucket_view=True, find_unused_parameters=find_unused)


def sync(forward: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """Context of one micro-batch's forward and backward: gradients travel only from the last one of a step."""
    if last or not isinstance(forward, DistributedDataParallel):
        return contextlib.nullcontext()
    return forward.no_sync()


def needs_settling(forward: nn.Module, world: World) -> bool:
    """Whether the first backward pass would add gradients in another order than those that follow; see `settle`."""
    return isinstance(forward, DistributedDataParallel) and world.size > 2 and not forward.find_unused_parameters


def settle(forward: nn.Module, batch: Any, world: World, precision: Precision, check_unused: bool) -> None:
    """Let DDP arrange its gradient buckets before the first step, with a backward pass of zeros.

    DDP arranges them anew after the first backward pass. With three ranks and more, the order in which an element is
    added over ranks depends on its place in the bucket: without this, the first step after a restart would differ in
    its last bits from the same step of a run that went on (seen on gloo with 3 and 4 ranks). Leaves no gradient, and
    buffers as they were.
    """
    buffers = [buffer.clone() for buffer in forward.buffers()]
    with precision.autocast():
        losses: Losses = forward(batch)
    if check_unused:
        check_all_used(forward, losses, world)
    torch.autograd.backward(list(losses.values()), [torch.zeros_like(loss) for loss in losses.values()])
    for parameter in forward.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in zip(forward.buffers(), buffers, strict=True):
            buffer.copy_(before)


def unwrap(forward: nn.Module) -> nn.Module:
    """The user's model inside what `wrap` returned."""
    inner = forward.module if isinstance(forward, DistributedDataParallel) else forward
    assert isinstance(inner, Forward)
    return inner.model


def sync_buffers(forward: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics), before evaluating or saving.

    DDP does the same at the next forward pass of training, so doing it here at any step changes no result.
    """
    if isinstance(forward, DistributedDataParallel):
        world.broadcast_tensors(list(forward.buffers()))


def check_all_used(forward: nn.Module, losses: Losses, world: World) -> None:
    """Raise on every rank where some rank's losses do not depend on some trainable parameter.

    Reads the autograd graph before the backward pass: once DDP has begun to reduce, ranks that use other parameters
    pair their collectives wrongly, which gloo does not always notice.

    Raises:
        TrainingError: names the parameters and the remedy.
    """
    used = _leaves(losses)
    named = [(name, p) for name, p in unwrap(forward).named_parameters() if p.requires_grad]
    unused_on = world.all_sum([float(id(p) not in used) for _, p in named])
    unused = [name for (name, _), count in zip(named, unused_on, strict=True) if count]
    if unused:
        shown = ", ".join(unused[:10]) + (f" and {len(unused) - 10} more" if len(unused) > 10 else "")
        raise TrainingError(
            f"{len(unused)} trainable parameters got no gradient: {shown}",
            where="first step",
            remedy="use them in the loss, freeze them (requires_grad_(False)), "
            "or set parallel.find_unused_parameters=true where each batch uses other parts of the model",
        )


def _leaves(losses: Losses) -> set[int]:
    """Identities of the leaf tensors that `losses` depend on."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    pending = [loss.grad_fn for loss in losses.values()]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves.add(id(variable))
        pending.extend(parent for parent, _ in node.next_functions)
    return leaves
