"""FSDP2: a model whose parameters, gradients and optimizer state are spread over ranks, by their first dimension."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed import world as worlds
from lockstep.distributed.world import World
from lockstep.errors import TrainingError, UsageError

_CHUNK = 1 << 25  # bytes of a parameter that travel at a time
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NumberFormat = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Sharding:
    """How `fully_shard` is used.

    reshard_after_forward: free a block's gathered parameters after its forward pass, and gather them again for the backward pass.
    shard_ranks: shard over groups of so many neighbouring ranks and replicate across groups (hybrid); None: over all.
    cpu_offload: keep parameters, gradients and optimizer state in host memory.
    forward_prefetch, backward_prefetch: how many blocks ahead to gather; 0 leaves it to FSDP, which gathers the next one.
    param_dtype, reduce_dtype: what parameters are gathered and gradients reduced in; None: what they are stored in.
    """

    reshard_after_forward: bool = True
    shard_ranks: int | None = None
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    param_dtype: NumberFormat | None = None
    reduce_dtype: NumberFormat | None = None


@dataclass(frozen=True)
class LocalShard:
    """What one rank holds of a tensor: rows `start` to `start + len(local)` of one of `shape`; all of it where it is not sharded.

    writer: whether this rank is the one to save these rows; None where every rank holds them.
    """

    local: Tensor
    start: int
    shape: tuple[int, ...]
    writer: bool | None = None


def is_sharded(tensor: Tensor) -> bool:
    """Whether only a part of it is here."""
    return hasattr(tensor, "device_mesh")  # a DTensor; its class would take a second to import


def local(tensor: Any) -> Tensor:
    """The part of a tensor that is here, as a plain tensor that shares its memory."""
    plain: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return plain


def local_shard(tensor: Any, number: int = 0) -> LocalShard:
    """What is here of `tensor`. Replicas take turns to be the writer, by `number`."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return LocalShard(tensor, 0, tuple(tensor.shape))
    mesh = tensor.device_mesh
    placements = [type(one).__name__ for one in tensor.placements]
    if placements[-1] != "Shard" or tensor.placements[-1].dim != 0 or placements[:-1] not in ([], ["Replicate"]):
        raise TrainingError(
            f"a tensor of shape {tuple(tensor.shape)} is spread as {placements}; only rows over ranks are known"
        )
    position, ranks = mesh.get_local_rank("shard"), mesh.size(mesh.mesh_dim_names.index("shard"))
    each = -(-tensor.shape[0] // ranks)  # as torch.chunk cuts
    writer = mesh.ndim == 1 or number % mesh.size(0) == mesh.get_local_rank("replicate")
    return LocalShard(local(tensor), min(position * each, tensor.shape[0]), tuple(tensor.shape), writer)


def like(rows: Tensor, model: Any) -> Tensor:
    """`rows`, this rank's part, as a tensor that is spread as `model` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def gather(tensor: Any) -> Tensor:
    """All of a tensor, on every rank. A collective where it is sharded."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def gather_on_rank0(tensor: Tensor, world: World) -> Tensor:
    """All of a tensor in host memory on rank 0; an empty one elsewhere."""
    whole = gather(tensor.detach())
    return whole.cpu() if world.rank == 0 else torch.empty(0)


def shard(forward: nn.Module, blocks: Sequence[nn.Module], world: World, options: Sharding) -> nn.Module:
    """Apply `fully_shard` to each of `blocks` (outermost ones, in order), then to `forward` as the root.

    Parameters outside the blocks are the root's: gathered for the whole forward and backward pass. Parameters may be on the
    meta device, see `materialise`. fp32 master weights: parameters stay in their own dtype, whatever they are gathered in.

    Raises:
        UsageError: a number of ranks that does not divide the world, a parameter without dimensions.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    _check(forward, blocks)
    attributes = {name: vars(parameter) for name, parameter in forward.named_parameters()}
    # Inputs keep their dtype: autocast chooses per operation, and targets of a regression are no parameters.
    param_dtype = _DTYPES[options.param_dtype] if options.param_dtype else None
    reduce_dtype = _DTYPES[options.reduce_dtype] if options.reduce_dtype else (torch.float32 if param_dtype else None)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    # Annotated, because the options' types differ between torch versions.
    common: dict[str, Any] = {"mesh": _mesh(world, options.shard_ranks), "mp_policy": policy, "offload_policy": offload}
    for block in blocks:
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **common)
    fully_shard(forward, **common)
    for name, parameter in forward.named_parameters():
        vars(parameter).update(attributes[name])  # what a model notes on its parameters; FSDP makes new ones
    sharded: list[Any] = [block for block in blocks if isinstance(block, FSDPModule)]
    for place, block in enumerate(sharded):
        if options.forward_prefetch:
            block.set_modules_to_forward_prefetch(sharded[place + 1 : place + 1 + options.forward_prefetch])
        if options.backward_prefetch:
            block.set_modules_to_backward_prefetch(sharded[max(0, place - options.backward_prefetch) : place][::-1])
    return forward


def _check(forward: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """What FSDP cannot shard, in words that name it."""
    of_block = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    kinds: dict[int, dict[torch.dtype, str]] = {}
    for name, parameter in forward.named_parameters():
        name = name.removeprefix("model.")
        if parameter.ndim == 0:
            remedy = "make it a tensor of one element, shape (1,), or use ddp"
            raise UsageError(
                f"parameter {name} has no dimension to shard", where="parallel.strategy=fsdp", remedy=remedy
            )
        if parameter.requires_grad:
            kinds.setdefault(of_block.get(id(parameter), -1), {}).setdefault(parameter.dtype, name)
    for group in kinds.values():
        if len(group) > 1:
            named = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in group.items())
            remedy = "use one dtype, or give modules of another a place of their own in parallel.shard_modules"
            raise UsageError(
                f"parameters that are sharded together have several dtypes: {named}",
                where="parallel.strategy=fsdp",
                remedy=remedy,
            )


def _mesh(world: World, shard_ranks: int | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    size = shard_ranks or world.size
    if size > world.size or world.size % size:
        divisors = [n for n in range(1, world.size + 1) if world.size % n == 0]
        what = f"{world.size} ranks cannot be cut into groups of {size}"
        raise UsageError(what, where="parallel.shard_ranks", remedy=f"use one of {', '.join(map(str, divisors))}")
    shape, names = (
        ((world.size,), ("shard",)) if size == world.size else ((world.size // size, size), ("replicate", "shard"))
    )
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    worlds.retire([mesh.get_group(name) for name in names])
    return mesh


def reshard(forward: nn.Module) -> None:
    """Let go of gathered parameters: values that are set from now on count, and an evaluation leaves no memory taken."""
    modules: list[Any] = [module for module in forward.modules() if hasattr(module, "reshard")]
    for module in modules:
        module.reshard()


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients, of sharded parameters over all ranks: a scalar on the device, equal on all ranks."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads or not is_sharded(grads[0]):
        return nn.utils.get_total_norm(grads)
    with torch.no_grad():  # so that `local` is a look-up, and no node of a graph
        mine = nn.utils.get_total_norm([local(grad) for grad in grads])
        square = mine.double().square()
    dist.all_reduce(square, group=grads[0].device_mesh.get_group("shard"))  # type: ignore[attr-defined]
    return square.sqrt().to(mine.dtype)


def clip_grads(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients by max_norm / norm where the norm is larger. Every rank scales what it holds."""
    with torch.no_grad():
        held: Any = [
            SimpleNamespace(grad=local(parameter.grad)) for parameter in parameters if parameter.grad is not None
        ]
    nn.utils.clip_grads_with_norm_(held, max_norm, norm)


def scale_grads(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a number. Every rank scales what it holds."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)


# ---- from one full copy on rank 0 to shards


def take_values(model: nn.Module) -> dict[str, Tensor]:
    """Move `model` to the meta device and return what it held, parameters and buffers by name. Tied tensors stay tied."""
    values: dict[str, Tensor] = {}
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # the old one is kept so that its id stays its own
    for name, holder, key, tensor in _tensors(model):
        if id(tensor) not in replaced:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # contiguous, as FSDP wants it
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            meta.__dict__.update(tensor.__dict__)
            replaced[id(tensor)] = (tensor, meta)
            values[name] = tensor.detach()
        holder[key] = replaced[id(tensor)][1]
    return values


def materialise(model: nn.Module, values: dict[str, Tensor], world: World, device: torch.device) -> None:
    """Give a model on the meta device, sharded or not, the values that rank 0 has.

    Args:
        values: on rank 0 what `take_values` returned there; it is emptied on the way, so that never more than one full copy
            exists. Elsewhere empty.
        device: where parameters live.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    parcel = torch.empty(_CHUNK, dtype=torch.uint8, device=world.device)
    for name, holder, key, tensor in _tensors(model):
        if id(tensor) not in made:
            place = device if isinstance(tensor, nn.Parameter) else world.device
            made[id(tensor)] = (tensor, _receive(tensor, values.pop(name, None), world, place, parcel))
        holder[key] = made[id(tensor)][1]


def _receive(meta: Tensor, full: Tensor | None, world: World, device: torch.device, parcel: Tensor) -> Tensor:
    """A tensor as `meta` describes it, on `device`, with rank 0's values; they travel in `parcel`, some rows at a time."""
    rows = local_shard(meta)
    mine = torch.empty_like(rows.local, device=device)
    if not meta.ndim:
        mine = full.to(device, copy=True) if full is not None else mine
        world.broadcast_tensors([mine])
    per_row = max(1, math.prod(meta.shape[1:])) * meta.element_size()
    if per_row > len(parcel):
        parcel = torch.empty(per_row, dtype=torch.uint8, device=world.device)
    count = len(parcel) // per_row
    for begin in range(0, len(meta) if meta.ndim else 0, count):
        end = min(begin + count, len(meta))
        part = (
            parcel[: math.prod((end - begin, *meta.shape[1:])) * meta.element_size()]
            .view(meta.dtype)
            .view(end - begin, *meta.shape[1:])
        )
        if full is not None:
            part.copy_(full[begin:end])
        world.broadcast_tensors([part])
        first, last = max(begin, rows.start), min(end, rows.start + len(mine))
        if first < last:
            mine[first - rows.start : last - rows.start].copy_(part[first - begin : last - begin])
    whole = like(mine, meta) if is_sharded(meta) else mine
    if isinstance(meta, nn.Parameter):
        whole = nn.Parameter(whole.detach(), requires_grad=meta.requires_grad)
    whole.__dict__.update(meta.__dict__)
    return whole


def _tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Every place of a parameter or buffer: its name, the dictionary and key that hold it, and the tensor."""
    for prefix, module in model.named_modules():
        for holder in (module._parameters, module._buffers):
            for key, tensor in list(holder.items()):
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, holder, key, tensor


def build(make: Callable[[], nn.Module], world: World) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """A model on the meta device, and on rank 0 the values that `make` gave it there.

    Other ranks call `make` under `torch.device("meta")`: they hold no copy. Where that does not work (a model that computes
    with its weights while it is made), every rank makes it in full and lets go of it.

    Returns:
        the model, the values (empty but on rank 0), and what should be told.

    Raises:
        TrainingError: `make` gives models of other shapes on different ranks.
    """
    fault: str | None = None
    model: nn.Module | None = None
    try:
        with torch.device("meta") if world.rank else contextlib.nullcontext():
            model = make()
        fault = _stray_meta(model) if world.rank else None
    except Exception as error:  # if rank 0 cannot make it, it raises below, and so do the others
        fault = f"{type(error).__name__}: {error}"
    faults = [one for one in world.broadcast(world.gather(fault)) if one]
    if faults and (world.rank or model is None):
        model = make()
    assert model is not None
    values = take_values(model)
    shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, _, _, tensor in _tensors(model)}
    expected: Mapping[str, Any] = world.broadcast(shapes)
    differing = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    wrong = next((one for one in world.broadcast(world.gather((world.rank, differing))) if one[1]), None)
    if wrong:
        what = f"rank {wrong[0]} made another model than rank 0: {', '.join(wrong[1][:5])}"
        raise TrainingError(what, where="Task.model", remedy="make the model alike on all ranks")
    told = [f"the model cannot be made without its values ({faults[0]}): every rank made it in full"] if faults else []
    return model, values if world.rank == 0 else {}, told


def _stray_meta(model: nn.Module) -> str | None:
    """A tensor on the meta device that is neither parameter nor buffer: nobody would give it values."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and _holds_meta(value):
                return f"{prefix}.{key} is a tensor, but no buffer".lstrip(".")
    return None


def _holds_meta(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_meta, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_meta, value))
    return isinstance(value, Tensor) and value.is_meta
