"""How a model is spread over ranks: single, DDP and FSDP2, as functions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed import sharding
from lockstep.distributed.precision import Precision
from lockstep.distributed.sharding import Sharding
from lockstep.distributed.world import World
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

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any, call: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Loss sums by head; a single loss is the head `loss`. Or whatever `call` makes of the model and the batch."""
        if call is not None:
            return call(self.model, batch)
        losses, _ = split_output(self.loss(self.model, batch))
        return by_head(losses)


def split_output(returned: Any) -> tuple[Any, Any]:
    """The losses and the output that `Task.loss` returned. The output is None if it returned the losses alone."""
    return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)


def by_head(losses: Any, where: str = "Task.loss") -> Losses:
    """What a task's loss returned, by head, in the order of the heads' names; a single loss is the head `loss`.

    Raises:
        TrainingError: something else than a scalar tensor of floating-point numbers, or a dict of these.
    """
    remedy = "return the SUM of the loss over its units: a scalar tensor, or a dict of scalar tensors by head"
    heads: Mapping[Any, Any] = losses if isinstance(losses, Mapping) else {"loss": losses}
    if not heads:
        raise TrainingError("it returned an empty dict", where=where, remedy=remedy)
    for head, value in heads.items():
        named = f"head {head!r} is" if isinstance(losses, Mapping) else "it returned"
        if not isinstance(head, str):
            raise TrainingError(
                f"a head is called {head!r}, a {type(head).__name__}", where=where, remedy="use text as keys"
            )
        if not isinstance(value, Tensor):
            shown = "" if value is None or isinstance(value, Mapping | list | tuple | set) else f" ({value!r})"
            raise TrainingError(f"{named} a {type(value).__name__}{shown}", where=where, remedy=remedy)
        if value.ndim or not value.is_floating_point():
            what = f"{named} a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
            raise TrainingError(what, where=where, remedy=remedy)
    return {head: heads[head] for head in sorted(heads)}


def resolve(strategy: StrategyName, world: World) -> StrategyName:
    """What a strategy is on this world: on one rank there is nothing to synchronise or to shard, so all are `single`.

    Raises:
        UsageError: `single` on several ranks, which would train as many models.
    """
    if world.size == 1:
        return "single"
    if strategy == "single":
        raise UsageError(
            f"{world.size} ranks would train {world.size} models",
            where="parallel.strategy=single",
            remedy="use ddp or fsdp, or one rank",
        )
    return strategy


def wrap(
    forward: nn.Module,
    strategy: StrategyName,
    world: World,
    buckets: Buckets | None = None,
    blocks: Sequence[nn.Module] = (),
    options: Sharding | None = None,
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
            raise UsageError(
                "fsdp cannot train with unused parameters", where="parallel.find_unused_parameters", remedy=remedy
            )
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


def needs_bucket_warm_up(forward: nn.Module, world: World) -> bool:
    """Whether the first backward pass would add gradients in another order than those that follow, or must not be one
    without reduction, as with a static graph; see `warm_up_buckets`."""
    if not isinstance(forward, DistributedDataParallel):
        return False
    return forward.static_graph or (world.size > 2 and not forward.find_unused_parameters)


def warm_up_buckets(
    forward: nn.Module,
    batch: Any,
    world: World,
    precision: Precision,
    check_unused: bool,
    looked_at: Sequence[str] = (),
) -> None:
    """Let DDP arrange its gradient buckets before the first step, with a backward pass of zeros.

    DDP arranges them anew after the first backward pass. With three ranks and more, the order in which an element is
    added over ranks depends on its place in the bucket: without this, the first step after a restart would differ in
    its last bits from the same step of a run that went on (seen on gloo with 3 and 4 ranks). Leaves no gradient, and
    buffers as they were.

    Args:
        looked_at: heads of coefficient 0, which may be constants.
    """
    dry_run(
        forward,
        batch,
        precision,
        (lambda losses: check_all_used(forward, losses, world)) if check_unused else None,
        looked_at,
    )


def dry_run(
    forward: nn.Module,
    batch: Any,
    precision: Precision,
    look: Callable[[Losses], None] | None = None,
    looked_at: Sequence[str] = (),
) -> None:
    """A forward and a backward pass of zeros that leave no trace. With a `unwrap_ddp` forward, on this rank alone: to see whether its memory suffices.

    look: called with the losses, before the backward pass.
    """
    with _without_trace(forward):
        with precision.autocast():
            losses: Losses = forward(batch)
        losses = {head: loss for head, loss in losses.items() if loss.requires_grad or head not in looked_at}
        if look is not None:
            look(losses)
        tensors, zeros = backward_roots(
            forward, losses, {head: torch.zeros_like(loss) for head, loss in losses.items()}, last=True
        )
        torch.autograd.backward(tensors, zeros)


def backward_roots(
    forward: nn.Module, losses: Losses, gradients: Losses, last: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What `torch.autograd.backward` takes for the gradient of sum_k gradients[k] * losses[k], over the heads of `gradients`.

    A head without units may be a constant. In the last pass of a step, parameters that are then out of reach are roots
    themselves, with gradients of zeros: the other ranks wait for theirs.

    Raises:
        TrainingError: a constant under a strategy that cannot do without its parameters.
    """
    tensors = [losses[head] for head in gradients if losses[head].requires_grad]
    grads = [gradient for head, gradient in gradients.items() if losses[head].requires_grad]
    constants = [head for head in gradients if not losses[head].requires_grad]
    if not constants:
        return tensors, grads
    finds_unused = isinstance(forward, DistributedDataParallel) and forward.find_unused_parameters
    is_static = isinstance(forward, DistributedDataParallel) and forward.static_graph
    if is_sharded(forward) or is_static or (finds_unused and last and not tensors):
        remedy = "let it depend on its parameters where it has no units, such as a sum over an empty selection of the model's output"
        where = (
            "parallel.strategy=fsdp"
            if is_sharded(forward)
            else f"parallel.{'static_graph' if is_static else 'find_unused_parameters'}"
        )
        raise TrainingError(
            f"the loss of head {constants[0]!r} is a constant, which depends on no parameter",
            where=where,
            remedy=remedy,
        )
    if last and not finds_unused:
        unused, parameters = _unused(forward, _leaves(losses)), dict(unwrap(forward).named_parameters())
        missing = [parameters[name] for name, is_unused in unused.items() if is_unused]
        tensors += missing
        grads += [torch.zeros_like(parameter) for parameter in missing]
    return tensors, grads


def check_reduced(forward: nn.Module) -> None:
    """After the last backward pass of a step: raise where DDP still waits for gradients.

    DDP itself raises at its next forward pass. Until then this rank's other collectives would be paired with the gradients
    that other ranks wait for, which ends in an abort without words (gloo) or a hang.

    Raises:
        TrainingError: trainable parameters that this rank did not use, while others may have. Names them.
    """
    if not isinstance(forward, DistributedDataParallel) or forward.find_unused_parameters:
        return
    try:
        forward.reducer._rebuild_buckets()  # private; what DDP's next forward pass calls, and raises from
    except RuntimeError as error:
        trainable = [name.removeprefix("model.") for name, p in forward.module.named_parameters() if p.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = [trainable[int(number)] for number in found[1].split()] if found else ["(DDP does not say which)"]
        raise _unused_error(unused, "Task.loss", " on this rank, though they did before") from error


def _unused_error(names: Sequence[str], where: str, when: str = "") -> TrainingError:
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return TrainingError(
        f"{len(names)} trainable parameters got no gradient{when}: {shown}",
        where=where,
        remedy="use them in the loss, freeze them (requires_grad_(False)), "
        "or set parallel.find_unused_parameters=true where each batch uses other parts of the model",
    )


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


def unwrap_ddp(forward: nn.Module) -> nn.Module:
    """The `Forward` in what `wrap` returned, for passes without gradient. Where it is sharded, all ranks run equally many."""
    return forward.module if isinstance(forward, DistributedDataParallel) else forward


def unwrap(forward: nn.Module) -> nn.Module:
    """The user's model inside what `wrap` returned."""
    inner = unwrap_ddp(forward)
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
    pair their collectives wrongly, which gloo does not always notice. Where a head is a constant, see `backward_roots`.

    Raises:
        TrainingError: names the parameters and the remedy.
    """
    is_constant = any(not loss.requires_grad for loss in losses.values())
    here = _unused(forward, _leaves(losses))
    unused_on = world.all_sum([float(unused and not is_constant) for unused in here.values()])
    names = [name for name, count in zip(here, unused_on, strict=True) if count]
    most = int(max(unused_on, default=0))
    if names:
        raise _unused_error(names, "first step", "" if most == world.size else f" on {most} of {world.size} ranks")


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
