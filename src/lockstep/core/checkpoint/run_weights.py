"""The weights in a checkpoint, read as if they were in a safetensors file."""

from __future__ import annotations

from collections.abc import KeysView

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


class RunWeights:
    """The weights of a checkpoint: their moving average, where the run kept an average. Reads a tensor when asked.

    It has the methods of an open safetensors file.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self.index = checkpoint.path, checkpoint.index
        self.stored = {name.removeprefix("model."): name for name in self.index if name.startswith("model.")}
        self.stored |= {name.removeprefix("ema."): name for name in self.index if name.startswith("ema.")}

    def keys(self) -> KeysView[str]:
        """The names that the tensors have in the model."""
        return self.stored.keys()

    def get_tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        return self.rows(name, None)

    def get_slice(self, name: str) -> RunSlice:
        """A tensor of which single rows can be read."""
        return RunSlice(self, name)

    def rows(self, name: str, wanted: tuple[int, int] | None) -> Tensor:
        """The rows from the first number to the second (exclusive) of a tensor; None: all."""
        ((_, tensor),) = files.read(self.folder, self.index, {self.stored[name]: wanted})
        return tensor


class RunSlice:
    """A tensor of a checkpoint, of which single rows can be read."""

    def __init__(self, weights: RunWeights, name: str) -> None:
        self.weights, self.name = weights, name
        self.entry = weights.index[weights.stored[name]]

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self.entry["shape"])

    def get_dtype(self) -> str:
        """The name of the type in safetensors files; torch's name for types that these files do not have."""
        name = str(self.entry["dtype"])
        return DTYPES.get(name, name)

    def __getitem__(self, rows: slice) -> Tensor:
        if rows.start is None and rows.stop is None:
            return self.weights.get_tensor(self.name)
        begin, end, _ = rows.indices(self.entry["shape"][0])
        return self.weights.rows(self.name, (begin, end))
