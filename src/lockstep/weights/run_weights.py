"""Weights that are stored in files of any kind, or in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.core.checkpoint import files
from lockstep.core.checkpoint.store import Checkpoint

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of types in safetensors files, by their names in torch."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    shape: list[int]
    dtype: str
    """The name of the type in safetensors files; torch's name for types that these files do not have."""
    read: Callable[[slice | None], Tensor]
    """Reads rows of the tensor to the CPU. None: all."""


def in_memory(tensor: Tensor) -> StoredTensor:
    """A tensor of a `torch.save` file, whose bytes are read when they are used."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(
        list(tensor.shape), DTYPES.get(dtype, dtype), lambda rows: tensor if rows is None else tensor[rows]
    )


def in_checkpoint(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The weights of a checkpoint by their names in the model: their moving average, if the run kept one."""
    index = checkpoint.index
    stored = {name.removeprefix(kind): name for kind in ("model.", "ema.") for name in index if name.startswith(kind)}

    def read(name: str, entry: dict[str, Any], rows: slice | None) -> Tensor:
        begin, end, _ = rows.indices(entry["shape"][0]) if rows is not None else (0, 0, 1)
        ((_, tensor),) = files.read(checkpoint.path, index, {name: None if rows is None else (begin, end)})
        return tensor

    found = {}
    for name, of in stored.items():
        dtype = str(index[of]["dtype"])
        found[name] = StoredTensor(list(index[of]["shape"]), DTYPES.get(dtype, dtype), partial(read, of, index[of]))
    return found
