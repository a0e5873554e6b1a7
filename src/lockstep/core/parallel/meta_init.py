"""Make a model on the meta device, and later give it the values of rank 0: no other rank ever holds a full copy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import TrainingError
from lockstep.core.parallel.sharded_tensor import is_sharded, like, local_shard, own_columns
from lockstep.core.parallel.world import World

_MESSAGE_BYTES = 1 << 25  # of a parameter, sent at a time


def build_on_meta(make: Callable[[], nn.Module], world: World) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """A model on the meta device, and on rank 0 the values that `make` gave it there.

    Other ranks call `make` under `torch.device("meta")`, so they hold no copy. If that does not work (a model that
    computes with its weights while it is made), every rank makes the model in full and drops the values.

    Returns:
        the model, its values by name (empty except on rank 0), and messages for the log.

    Raises:
        TrainingError: `make` returns models of other shapes on different ranks.
    """
    fault: str | None = None
    model: nn.Module | None = None
    try:
        with torch.device("meta") if world.rank else contextlib.nullcontext():
            model = make()
        fault = _stray_meta_tensor(model) if world.rank else None
    except Exception as error:  # if rank 0 cannot make the model, it raises below, and so do the others
        fault = f"{type(error).__name__}: {error}"
    faults = [text for text in world.broadcast(world.gather(fault)) if text]
    if faults and (world.rank or model is None):
        model = make()
    assert model is not None
    values = take_values(model)
    shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, _, _, tensor in _tensors(model)}
    expected: Mapping[str, Any] = world.broadcast(shapes)
    differing = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    by_rank: list[tuple[int, list[str]]] = world.broadcast(world.gather((world.rank, differing)))
    for rank, names in by_rank:
        if names:
            what = f"rank {rank} made a different model from rank 0: {', '.join(names[:5])}"
            raise TrainingError(what, where="Task.model", remedy="make the same model on all ranks")
    messages = []
    if faults:
        messages.append(f"the model cannot be made without its values ({faults[0]}): every rank made it in full")
    return model, values if world.rank == 0 else {}, messages


def take_values(model: nn.Module) -> dict[str, Tensor]:
    """Move `model` to the meta device and return the values of its parameters and buffers by name.

    Tied tensors stay tied; each has one entry.
    """
    values: dict[str, Tensor] = {}
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the old tensor is kept so that its id stays its own
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
        values: on rank 0 the values that `take_values` returned there; elsewhere empty. Emptied meanwhile, so that
            never more than one full copy exists.
        device: where parameters live. Buffers live on the device of the rank.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    message = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device=world.device)
    for name, holder, key, tensor in _tensors(model):
        if id(tensor) not in made:
            place = device if isinstance(tensor, nn.Parameter) else world.device
            made[id(tensor)] = (tensor, _receive(tensor, values.pop(name, None), world, device=place, message=message))
        holder[key] = made[id(tensor)][1]


def _receive(meta: Tensor, full: Tensor | None, world: World, *, device: torch.device, message: Tensor) -> Tensor:
    """A tensor as `meta` describes it, on `device`, with the values of rank 0. The rows travel in `message`."""
    rows = local_shard(meta)
    mine = torch.empty_like(rows.local, device=device)
    if not meta.ndim:
        mine = full.to(device, copy=True) if full is not None else mine
        world.broadcast_tensors([mine])
    per_row = max(1, math.prod(meta.shape[1:])) * meta.element_size()
    if per_row > len(message):
        message = torch.empty(per_row, dtype=torch.uint8, device=world.device)
    count = len(message) // per_row
    for begin in range(0, len(meta) if meta.ndim else 0, count):
        end = min(begin + count, len(meta))
        shape = (end - begin, *meta.shape[1:])
        part = message[: math.prod(shape) * meta.element_size()].view(meta.dtype).view(shape)
        if full is not None:
            part.copy_(full[begin:end])
        world.broadcast_tensors([part])
        first, last = max(begin, rows.start), min(end, rows.start + len(mine))
        if first < last:
            mine[first - rows.start : last - rows.start].copy_(own_columns(part[first - begin : last - begin], meta))
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


def _stray_meta_tensor(model: nn.Module) -> str | None:
    """A message about a tensor on the meta device that is neither parameter nor buffer: nobody would give it values."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and _holds_meta(value):
                return f"{prefix}.{key} is a tensor, but not a buffer".lstrip(".")
    return None


def _holds_meta(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_meta, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_meta, value))
    return isinstance(value, Tensor) and value.is_meta
