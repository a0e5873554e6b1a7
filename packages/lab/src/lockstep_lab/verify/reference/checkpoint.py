"""Reads checkpoints with `torch.distributed.checkpoint`. `docs/checkpoints.md` describes the files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

_BYTES_AT_ONCE = 1 << 28


class SavedState:
    """A checkpoint on disk.

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())["checkpoint"]
        self.values: dict[str, Any] = json.loads((path / "index.json").read_text())["values"]
        """The parts of the state that are not tensors, by name."""
        self.step = int(path.name.removeprefix("step-"))
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        self._tensors = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    @property
    def names(self) -> set[str]:
        """Names of the tensors: `model.*`, `optimizer.*` and, with `train.ema_decay`, `ema.*`."""
        return set(self._tensors)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, sorted by name. Few tensors are in memory at a time."""
        part: dict[str, Tensor] = {}
        for name in sorted(names):
            part[name] = torch.empty(self._tensors[name].size, dtype=self._tensors[name].properties.dtype)
            if sum(tensor.nbytes for tensor in part.values()) >= _BYTES_AT_ONCE:
                yield from self._filled(part)
                part = {}
        yield from self._filled(part)

    def _filled(self, part: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if part:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about reading without a process group
                load(part, storage_reader=FileSystemReader(self.path), no_dist=True)
        yield from part.items()


def newest(folder: str | Path) -> SavedState | None:
    """The newest complete checkpoint in a run directory."""
    found = complete(folder)
    return SavedState(found[-1]) if found else None


def complete(folder: str | Path) -> list[Path]:
    """The folders of the complete checkpoints in a run directory, the newest last."""
    return sorted(manifest.parent for manifest in Path(folder).glob("checkpoints/step-*/manifest.json"))


def load_trained_weights(state: SavedState, model: nn.Module) -> None:
    """Give `model` the trained weights: their moving average, if the run kept one."""
    weights = {name.removeprefix("model."): value for name, value in state.read(_starting(state, "model."))}
    weights |= {name.removeprefix("ema."): value for name, value in state.read(_starting(state, "ema."))}
    model.load_state_dict(weights, strict=False)


def _starting(state: SavedState, prefix: str) -> list[str]:
    return [name for name in state.names if name.startswith(prefix)]
