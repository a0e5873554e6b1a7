"""How a model is spread over ranks: single, DDP and FSDP2, as functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import sharding
from lockstep.dist.precision import Precision
from lockstep.dist.sharding import Sharding
from lockstep.dist.world import World
from lockstep.errors import TrainingError, UsageError

StrategyName = Literal["single", "ddp", "fsdp"]
Losses = dict[str, Tensor]


@dataclass(frozen=True)
class Buckets:
    """How DDP sends gradients. Its own names: see `torch.nn.parallel.DistributedDataParallel`.

    find_unused_parameters: some trainable parameters get no gradient in some batches. static_graph: the same ones are used
    in every step. bucket_mb: gradients that travel together, in MiB; None leaves it to DDP.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: float | None = None
    gradient_as_bucket_view: bool = True


class Forward(nn.Module):
    """From a batch to the task's loss sums, as one module.

    DDP and FSDP wrap this, not the model: the task's loss may then call the model several times, or any of its methods and
    attributes, and means the same on one rank and on many.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor | Losses]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any, call: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Loss sums by head; a single loss is the head `loss`. Or whatever `call` makes of the model and the batch."""
        if call is not None:
            return call(self.model, batch)
        losses = self.loss(self.model, batch)
        return losses if isinstance(losses, dict) else {"loss": losses}


def resolve(strategy: StrategyName, world: World) -> StrategyName:
    """What a strategy is on this world: on one rank there is nothing to synchronise or to shard, so all are `single`.

    Raises:
        UsageError: `single` on several ranks, which would train as many models.
    """
    if world.size == 1:
        return "single"
    if strategy == "single":
        raise UsageError(f"{world.size} ranks would train {world.size} models", where="parallel.strategy=single", remedy="use ddp or fsdp, or one rank")
    return strategy


def wrap(
    forward: nn.Module, strategy: StrategyName, world: World, buckets: Buckets | None = None, blocks: Sequence[nn.Module] = (), options: Sharding | None = None
) -> nn.Module:
    """Make `forward`, a `Forward`, synchronise its gradients as the mean over ranks, during the backward pass.

    Args:
        buckets: for ddp.
        blocks, options: for fsdp; see `sharding.shard`.

    Raises:
        UsageError: options that do not fit the world or the model.
    """
    strategy, buckets = resolve(strategy, world), buckets or Buckets()
    if strategy == "single":
        return forward
    if strategy == "fsdp":
        if buckets.find_unused_parameters:
            remedy = "use ddp, or a model whose trainable parameters are all part of each loss"
            raise UsageError("fsdp cannot train with unused parameters", where="parallel.find_unused_parameters", remedy=remedy)
        return sharding.shard(forward, blocks, world, options or Sharding())
    return DistributedDataParallel(
        forward,
        bucket_cap_mb=buckets.bucket_mb,
        find_unused_parameters=buckets.find_unused_parameters,
        gradient_as_bucket_view=buckets.gradient_as_bucket_view,
        static_graph=buckets.static_graph,
    )


def is_sharded(forward: nn.Module) -> bool:
    """Whether `wrap` sharded it."""
    return hasattr(forward, "set_requires_gradient_sync")


def sync(forward: nn.Module, last: bool, world: World) -> contextlib.AbstractContextManager[None]:
    """Context of one micro-batch's forward and backward: gradients travel only from the last one of a step."""
    if isinstance(forward, DistributedDataParallel):
        return contextlib.nullcontext() if last else forward.no_sync()
    return _sharded_sync(forward, last, world) if is_sharded(forward) else contextlib.nullcontext()


@contextlib.contextmanager
def _sharded_sync(forward: Any, last: bool, world: World) -> Generator[None, None, None]:
    forward.set_requires_gradient_sync(last)
    yield
    if last:  # as DDP does before the next step's first forward pass
        world.broadcast_tensors(list(forward.buffers()))


def needs_settling(forward: nn.Module, world: World) -> bool:
    """Whether the first backward pass would add gradients in another order than those that follow, or must not be one
    without reduction, as with a static graph; see `settle`."""
    if not isinstance(forward, DistributedDataParallel):
        return False
    return forward.static_graph or (world.size > 2 and not forward.find_unused_parameters)


def settle(forward: nn.Module, batch: Any, world: World, precision: Precision, check_unused: bool) -> None:
    """Let DDP arrange its gradient buckets before the first step, with a backward pass of zeros.

    DDP arranges them anew after the first backward pass. With three ranks and more, the order in which an element is
    added over ranks depends on its place in the bucket: without this, the first step after a restart would differ in
    its last bits from the same step of a run that went on (seen on gloo with 3 and 4 ranks). Leaves no gradient, and
    buffers as they were.
    """
    rehearse(forward, batch, precision, (lambda losses: check_all_used(forward, losses, world)) if check_unused else None)


def rehearse(forward: nn.Module, batch: Any, precision: Precision, look: Callable[[Losses], None] | None = None) -> None:
    """A forward and a backward pass of zeros that leave no trace. With a `bare` forward, on this rank alone: to see whether its memory suffices.

    look: called with the losses, before the backward pass.
    """
    with _without_trace(forward):
        with precision.autocast():
            losses: Losses = forward(batch)
        if look is not None:
            look(losses)
        torch.autograd.backward(list(losses.values()), [torch.zeros_like(loss) for loss in losses.values()])


@contextlib.contextmanager
def _without_trace(forward: nn.Module) -> Generator[None, None, None]:
    """Leave no gradient, and buffers as they were."""
    buffers = [buffer.clone() for buffer in forward.buffers()]
    yield
    for parameter in forward.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in zip(forward.buffers(), buffers, strict=True):
            buffer.copy_(before)


def is_replicated(forward: nn.Module) -> bool:
    """Whether `wrap` arranged buckets for the gradients of what was trainable then."""
    return isinstance(forward, DistributedDataParallel)


def bare(forward: nn.Module) -> nn.Module:
    """The `Forward` in what `wrap` returned, for passes without gradient. Where it is sharded, all ranks run equally many."""
    return forward.module if isinstance(forward, DistributedDataParallel) else forward


def unwrap(forward: nn.Module) -> nn.Module:
    """The user's model inside what `wrap` returned."""
    inner = bare(forward)
    assert isinstance(inner, Forward)
    return inner.model


def sync_buffers(forward: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics), before evaluating or saving.

    The next step of training would begin with that anyway, so doing it here at any step changes no result.
    """
    world.broadcast_tensors(list(forward.buffers()))


def check_all_used(forward: nn.Module, losses: Losses, world: World) -> None:
    """Raise on every rank where some rank's losses do not depend on some trainable parameter.

    Reads the autograd graph before the backward pass: once DDP has begun to reduce, ranks that use other parameters
    pair their collectives wrongly, which gloo does not always notice.

    Raises:
        TrainingError: names the parameters and the remedy.
    """
    here = _unused(forward, _leaves(losses))
    unused_on = world.all_sum([float(unused) for unused in here.values()])
    unused = [name for name, count in zip(here, unused_on, strict=True) if count]
    if unused:
        shown = ", ".join(unused[:10]) + (f" and {len(unused) - 10} more" if len(unused) > 10 else "")
        raise TrainingError(
            f"{len(unused)} trainable parameters got no gradient: {shown}",
            where="first step",
            remedy="use them in the loss, freeze them (requires_grad_(False)), "
            "or set parallel.find_unused_parameters=true where each batch uses other parts of the model",
        )


def _unused(forward: nn.Module, used: set[int]) -> dict[str, bool]:
    """Whether each trainable parameter is missing among `used`. Sharded blocks are gathered one by one: the graph knows what they were gathered into."""
    model = unwrap(forward)
    found: dict[str, bool] = {}
    blocks: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
    for block in (None, *blocks):
        was_sharded = block is not None and any(sharding.is_sharded(p) for p in block.parameters())
        if was_sharded:
            block.unshard()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not sharding.is_sharded(parameter):
                found.setdefault(name, id(parameter) not in used)
        if was_sharded:
            block.reshard()
    return found


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
