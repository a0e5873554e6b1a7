"""Digests of tensors: equal for equal bits, shapes and types. A few passes over memory, on the tensor's device."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_COLUMNS = 1024
_SMALL = 16384
_MASK = (1 << 64) - 1
_weights: dict[tuple[torch.device, bool], torch.Tensor] = {}
_layouts: dict[tuple[torch.device, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}


def _mixed(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """`count` distinct numbers of 64 bits (int64; splitmix64 with shifts that keep signs)."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * seed
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def _weights_of(count: int, device: torch.device, is_rows: bool) -> torch.Tensor:
    known = _weights.get((device, is_rows))
    if known is None or known.numel() < count:
        seed = -7046029254386353131 if is_rows else -4417276706812531889
        known = _mixed(max(count, _COLUMNS), seed, device)
        _weights[(device, is_rows)] = known
    return known[:count]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as int64, 1-dim, padded with zeros."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # a single number may have the stride 0 of an expanded tensor
        flat = flat.clone(memory_format=torch.contiguous_format)
    size = flat.numel() * flat.element_size()
    if size % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=flat.device)
    padded[:size] = flat.view(torch.uint8)
    return padded.view(torch.int64)


def _sum(whole: torch.Tensor) -> torch.Tensor:
    """A sum of int64 weighted by position: by row and by column (int64, 0-dim)."""
    rows = whole.numel() // _COLUMNS
    rest = whole[rows * _COLUMNS :]
    table = whole[: rows * _COLUMNS].view(rows, _COLUMNS)
    total = (table.sum(0) * _weights_of(_COLUMNS, table.device, False)).sum()
    total = total + (table.sum(1) * _weights_of(rows, table.device, True)).sum()
    return total + (rest * _weights_of(rest.numel(), rest.device, False)).sum() * 5 if rest.numel() else total


def _sums_of_small(wholes: list[torch.Tensor]) -> torch.Tensor:
    """The same sum for each of many small tensors, in few operations (int64, as many as there are tensors)."""
    device, sizes = wholes[0].device, tuple(whole.numel() for whole in wholes)
    key = (device, sizes)
    if key not in _layouts:
        if len(_layouts) > 8:
            _layouts.clear()
        most = _weights_of(max(*sizes, 1), device, False)
        ends = torch.tensor(sizes, device=device).cumsum(0)
        _layouts[key] = (torch.cat([most[:size] for size in sizes]), ends)
    weights, ends = _layouts[key]
    running = torch.cat([ends.new_zeros(1), (torch.cat(wholes) * weights).cumsum(0)])
    until = running[ends]
    return until - torch.cat([ends.new_zeros(1), until[:-1]])


def _numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of each tensor on a device, with one wait for the device."""
    wholes = {name: _whole(tensor) for name, tensor in tensors.items()}
    small = {name: whole for name, whole in wholes.items() if whole.numel() < _SMALL}
    large = {name: _sum(whole) for name, whole in wholes.items() if name not in small}
    parts = [_sums_of_small(list(small.values()))] if small else []
    parts += [torch.stack(list(large.values()))] if large else []
    return dict(zip([*small, *large], torch.cat(parts).tolist(), strict=True))


def of_tensors(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, str | None]:
    """The digest of each tensor. None stays None. Waits once for each device."""
    with torch.no_grad():
        shards = {name: None if tensor is None else local(tensor) for name, tensor in tensors.items()}
        dense = {name: _dense(shard) for name, shard in shards.items() if shard is not None}
        numbers: dict[str, int] = {}
        for device in {tensor.device for tensor in dense.values()}:
            numbers |= _numbers({name: tensor for name, tensor in dense.items() if tensor.device == device})
    return {name: None if shard is None else _finish(numbers[name], shard) for name, shard in shards.items()}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor


def _finish(number: int, tensor: torch.Tensor) -> str:
    return f"{(number + _kind(tensor.dtype, tuple(tensor.shape))) & _MASK:016x}"


@functools.lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(f"{dtype}{shape}".encode(), digest_size=8).digest(), "little")


def is_constant(tensor: torch.Tensor) -> bool:
    """True if all numbers of a tensor, or of this rank's shard, are the same."""
    flat = local(tensor).detach().flatten()
    return bool((flat[:1] == flat).all()) if flat.layout == torch.strided else False


def of_numbers(numbers: Iterable[object]) -> str:
    """The digest of a sequence of numbers or texts."""
    return hashlib.blake2b(repr(list(numbers)).encode(), digest_size=8).hexdigest()


def tensors_in(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """The tensors of a batch: of nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one, depth - 1)
    elif depth and hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(list(vars(value).values()), depth - 1)


def of_batch(value: Any) -> list[str | None]:
    """The digest of each tensor of a batch, or of the text of a batch without a tensor."""
    tensors = {str(number): tensor for number, tensor in enumerate(tensors_in(value))}
    return list(of_tensors(tensors).values()) if tensors else [of_numbers([value])]
