"""What loader workers hand over to their rank. A fault then has a name, and no later batch changes an earlier one.

torch's DataLoader pickles what a worker returns in a background thread. A value that cannot be pickled is lost there,
and the rank waits for it in vain. torch also moves the memory of tensors, so that NumPy arrays which view them show
freed memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.core import shortages
from lockstep.core.data import difference
from lockstep.core.data.tensors import is_plain
from lockstep.core.errors import TrainingError

_REMEDY = (
    "put tensors, arrays, numbers and texts there, or objects that pickle can copy. With data.workers=0 nothing is "
    "handed over"
)
_SMALL = 1 << 14  # bytes of a tensor that are copied in less time than it takes to send the file of its memory
room = 1 << 30
"""How many tensors of a batch go through shared memory, where each is an open file of the rank until the batch is gone.
The others go through the worker's pipe, as small tensors do. Set in a worker by `workers`."""
_handed: set[StorageWeakRef] = set()
"""The memory of the tensors that this worker has handed over, while somebody in it still holds that memory."""


@dataclass
class Failure:
    """Carries an exception out of a loader worker. torch would rebuild the exception from its text alone."""

    error: Exception

    def pin_memory(self) -> Failure:
        """Called by torch's DataLoader, as for micro-batches."""
        return self


class Packed:
    """A value, pickled in the process that made it. Whoever unpickles this object gets the value, or a `Failure`.

    Args:
        name: of the value, for errors, such as `batch`.
        where: what made the value.

    Raises:
        TrainingError: a part of the value cannot be pickled; names the part.
        ShortageError: shared memory is full.
    """

    def __init__(self, value: Any, name: str, where: str) -> None:
        self.pickled, self.name, self.where = _pickled(value, name, where), name, where

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (self.pickled, self.name, self.where)


def packed(value: Any, name: str, where: str) -> Any:
    """In a loader worker, `Packed(value, name, where)`. In any other process, `value`, which nobody hands over."""
    return value if torch.utils.data.get_worker_info() is None else Packed(value, name, where)


def _pickled(value: Any, name: str, where: str) -> bytes:
    held = {memory for memory in _handed if not memory.expired()}  # type: ignore[no-untyped-call]
    _handed.clear()
    _handed.update(held)
    try:
        return _dumped(value, held)
    except Exception as error:
        if known := shortages.explanation(error):
            raise known from error
        parts = ((place, part) for place, part in difference.walk(value) if _fails(part, held))
        place, part = next(parts, ("", value))
        place = place.removeprefix(".collated")  # a micro-batch holds what users call the batch
        raise TrainingError(
            f"a loader worker cannot hand over {name}{place}, a {type(part).__name__}: {type(error).__name__}: {error}",
            where=where,
            remedy=_REMEDY,
        ) from error


def _unpickled(value: bytes, name: str, where: str) -> Any:
    try:
        return pickle.loads(value)
    except (OSError, EOFError):  # the worker has ended; see `worker_deaths.caused`
        raise
    except Exception as error:
        what = f"{name}, which a loader worker handed over, cannot be unpickled: {type(error).__name__}: {error}"
        return Failure(TrainingError(what, where=where, remedy=_REMEDY))


def _fails(part: Any, held: set[StorageWeakRef]) -> bool:
    try:
        _dumped(part, held)
    except Exception:
        return True
    return False


def _dumped(value: Any, held: set[StorageWeakRef]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, held).dump(value)
    return file.getvalue()


class _Pickler(ForkingPickler):
    """Copies tensors into shared memory, instead of moving their memory there: others may see it, or fill it again.

    Both take the same time. What is new in shared memory already, as from torch's `default_collate`, is not copied.
    Small tensors are pickled with their numbers.
    """

    def __init__(self, file: io.BytesIO, held: set[StorageWeakRef]) -> None:
        super().__init__(file)
        self.held, self.shared = held, 0

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.is_quantized:  # torch's reducer loses the scale
            file = io.BytesIO()
            torch.save(value, file)
            return _loaded, (file.getvalue(),)
        if type(value) is not Tensor or not is_plain(value) or value.device.type != "cpu":
            return NotImplemented
        can_be_copied = value.is_leaf or not value.requires_grad  # else torch's reducer raises
        if can_be_copied and (value.nbytes <= _SMALL or self.shared >= room):
            return _reduced_to_bytes(value)
        self.shared += 1
        is_shared = value.is_shared()  # type: ignore[no-untyped-call]
        is_new = is_shared and _memory(value) not in self.held
        if not is_new and can_be_copied:
            shared: Tensor = torch.empty_like(value, requires_grad=False).share_memory_()  # type: ignore[no-untyped-call]
            value = shared.copy_(value.detach()).requires_grad_(value.requires_grad)
        _handed.add(_memory(value))
        return self.dispatch_table[Tensor](value)


def _reduced_to_bytes(value: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    dense = torch.empty_like(value, requires_grad=False).copy_(value.detach())  # it may be a part of a larger tensor
    content = bytearray(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data)
    return _from_bytes, (content, value.dtype, dense.size(), dense.stride(), value.requires_grad)


def _from_bytes(
    content: bytearray, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], requires_grad: bool
) -> Tensor:
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.as_strided(size, stride).requires_grad_(requires_grad)


def _loaded(saved: bytes) -> Tensor:
    tensor: Tensor = torch.load(io.BytesIO(saved))
    return tensor


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
