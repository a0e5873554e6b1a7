"""Features of slices from a frozen backbone: computed once for each slice, and kept on disk.

While the backbone is frozen and pixels are not augmented, the feature vector of a slice is always the same. So it is
cached, and a later batch neither decodes the slice nor runs the backbone for it. The choice of slices of a sample may
be random: each slice has its own entry.

Who does what, and when:

- A loader worker chooses the slices of a sample, and looks up their features (`KeptFeatures.look_up`). It reads pixels
  only for slices without features.
- The model computes the missing features (`VolumeRiskModel.slice_features`), and the task's loss writes them
  (`KeptFeatures.update`). There is no separate pass over the data, so slices that training does not use are never
  computed. The first batches of a process find nothing, because workers learn only from the first `update` which
  backbone it is.
- Caching does not change a single bit of the result. A rank whose features are all cached does not run the backbone. If
  the forward pass of the backbone is a collective (FSDP), the ranks agree on the number of chunks, and a rank without
  missing features runs chunks of zeros.
- When the backbone starts to train, `update` stops the look-ups. Training batches are prepared ahead of time, so the
  task must not look up features for epochs in which the backbone trains.
"""

from __future__ import annotations

import hashlib
import os
import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.cache_folder import cache_root
from lockstep_recipes.tasks.ct.backbone import is_frozen
from lockstep_recipes.tasks.ct.model import FROZEN_CHUNK, VolumeRiskModel

_FORMAT = 1  # version of the files; it is part of the folder's name
_TAG = struct.Struct(
    "<II"
)  # before each vector: 1, and the CRC of the vector. An entry that was never written contains zeros
_DTYPES = {4: torch.float32, 8: torch.float64}


@dataclass
class SliceRows:
    """The slices that a sample takes from a volume, and their cached features."""

    key: str
    """Identifies the content of the volume."""
    numbers: Sequence[int]
    """Numbers of the slices in the volume."""
    features: Tensor | None
    """(slices, width), with zeros for missing features. None: no features are cached for any volume yet."""
    is_kept: Tensor
    """True for slices with features: bool (slices,)."""

    @property
    def missing(self) -> list[int]:
        """Numbers of the slices whose pixels are needed."""
        return [number for number, kept in zip(self.numbers, self.is_kept.tolist(), strict=True) if not kept]


def batch_entries(rows: Sequence[SliceRows]) -> dict[str, Any]:
    """The entries that `VolumeRiskModel` and `KeptFeatures.update` need in a batch, in addition to the missing slices.

    Returns:
        `to_keep`: for each volume its key and the numbers of the slices whose features are missing. If some are cached,
        also `features` (N, width) and `is_kept` (N), for all volumes one after another.
    """
    entries: dict[str, Any] = {"to_keep": [(row.key, row.missing) for row in rows]}
    known = next((row.features for row in rows if row.features is not None), None)
    if known is not None:
        blank = [
            known.new_zeros(len(row.numbers), known.shape[1]) if row.features is None else row.features for row in rows
        ]
        entries |= {"features": torch.cat(blank), "is_kept": torch.cat([row.is_kept for row in rows])}
    return entries


class KeptFeatures:
    """Feature vectors by volume and slice, in files that all processes of a machine read and write without locks.

    The folder's name identifies everything that determines a vector: `setting`, the weights of the backbone, and its
    output for a test image, which reveals a different number format, compiler or device. A file contains the vectors of
    one volume, each with its CRC. So a vector is either complete or absent, even if a process is killed. Two processes
    that write the same vector write the same bytes.

    The object is created before the loader's workers start, and all of them use it: shared memory tells them which
    folder to use.

    Args:
        setting: what determines the pixels of a slice: windows, size, resampling.
        root: parent of the folder. None: the machine's cache.
    """

    def __init__(self, setting: str, root: Path | None = None) -> None:
        self.setting = setting
        self.root = root or cache_root()
        self.stopped: str | None = None
        """Why this process stopped writing, or None."""
        # Whether vectors may be looked up, their length, the bytes of a number, and 16 bytes of the folder's name.
        self._shared = torch.zeros(5, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    # ---- in loader workers

    @property
    def is_open(self) -> bool:
        """True if vectors may be looked up because a frozen backbone has been seen."""
        return bool(self._shared[0])

    @property
    def folder(self) -> Path:
        """The folder of the vectors. Known once `is_open`."""
        name = self._shared[3:].numpy().tobytes().hex()
        return self.root / f"slice-features-{_FORMAT}-{name}"

    def look_up(self, key: str, numbers: Sequence[int]) -> SliceRows:
        """The cached features of some slices of a volume.

        In evaluations with averaged weights, do not look up features: averages of equal weights differ in the last
        bits.

        Args:
            key: identifies the content of the volume; letters, digits, `-` and `_`.
            numbers: the numbers of the slices, from 0.
        """
        is_kept = np.zeros(len(numbers), dtype=bool)
        if not self.is_open:
            return SliceRows(key, list(numbers), None, torch.from_numpy(is_kept))
        width, size = self._shared[1:3].tolist()
        rows = np.zeros((len(numbers), width * size), dtype=np.uint8)
        try:
            handle = os.open(self._file(key), os.O_RDONLY)
        except OSError:
            handle = -1
        if handle >= 0:
            length = _TAG.size + width * size
            try:
                for place, number in enumerate(numbers):
                    record = os.pread(handle, length, number * length)
                    content = memoryview(record)[_TAG.size :]
                    if len(record) == length and _TAG.unpack_from(record) == (1, zlib.crc32(content)):
                        rows[place] = np.frombuffer(content, dtype=np.uint8)
                        is_kept[place] = True
            except OSError:  # a damaged disk: compute the rest
                pass
            finally:
                os.close(handle)
        return SliceRows(key, list(numbers), torch.from_numpy(rows).view(_DTYPES[size]), torch.from_numpy(is_kept))

    # ---- in the process of the model

    def update(self, model: VolumeRiskModel, batch: Mapping[str, Any], features: Tensor) -> None:
        """Write the features that a batch lacked. The task's loss calls this in every forward pass.

        For a batch without the entry `to_keep`, this does nothing. The first call with a frozen backbone hashes all
        weights, and runs the backbone on a test image. If forward passes are collectives, all ranks make this first
        call in the same forward pass.

        Args:
            features: of all slices of the batch: what `VolumeRiskModel.slice_features` returned.
        """
        if not is_frozen(model.backbone):
            self._shared[0] = 0
            return
        if "to_keep" not in batch:
            return
        if not self.is_open:
            self._open(model, batch["slices"], features)
        if not len(batch["slices"]) or self.stopped is not None:
            return
        is_kept = batch.get("is_kept")
        new = features.detach() if is_kept is None else features.detach()[~is_kept]
        rows = new.cpu().contiguous().numpy()
        try:
            done = 0
            for key, numbers in batch["to_keep"]:
                self._write(key, numbers, rows[done : done + len(numbers)])
                done += len(numbers)
        except OSError as error:
            self.stopped = f"cannot be written ({error.strerror or error})"
            warnings.warn(
                f"the cache of features {self.folder}: {self.stopped}; training continues, and computes missing "
                "features in every epoch",
                RuntimeWarning,
                stacklevel=2,
            )

    def _open(self, model: VolumeRiskModel, slices: Tensor, features: Tensor) -> None:
        """Identify the backbone, and tell the workers."""
        digest = hashlib.sha256(repr((self.setting, FROZEN_CHUNK, tuple(slices.shape[1:]))).encode())
        digest.update(weights_digest(model.backbone).encode())
        digest.update(_bytes(model.slice_features({"slices": _test_image(slices)})))
        self._shared[1], self._shared[2] = features.shape[1], features.element_size()
        self._shared[3:] = torch.frombuffer(bytearray(digest.digest()[:16]), dtype=torch.int64)
        self._shared[0] = 1  # last: from now on workers read the rest

    def _write(self, key: str, numbers: Sequence[int], rows: Any) -> None:
        if not numbers:
            return
        path = self._file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for number, row in zip(numbers, rows, strict=True):
                content = row.tobytes()
                record = _TAG.pack(1, zlib.crc32(content)) + content
                if os.pwrite(handle, record, number * len(record)) != len(record):
                    raise OSError("the disk is full")
        finally:
            os.close(handle)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.rows"


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names. If parameters are sharded, this is a collective."""
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        plain: Any = tensor.detach()
        whole = plain.full_tensor() if hasattr(plain, "full_tensor") else plain
        digest.update(f"{name} {tuple(whole.shape)} {whole.dtype} ".encode())
        digest.update(_bytes(whole))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    # A copy: a storage that NumPy has seen cannot be resized, which FSDP does with gathered parameters.
    return (
        tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
    )


def _test_image(slices: Tensor) -> Tensor:
    """A chunk of uint8 noise, always the same, with the shape and the memory format of `slices`."""
    chunk = torch.empty(FROZEN_CHUNK, *slices.shape[1:], dtype=torch.uint8, device=slices.device)
    places = torch.arange(chunk.numel(), device=slices.device)
    noise = ((places * 2654435761) >> 15).remainder(256).to(torch.uint8).view(chunk.shape)
    channels_last = slices.is_contiguous(memory_format=torch.channels_last) and not slices.is_contiguous()
    return noise.contiguous(memory_format=torch.channels_last) if channels_last else noise
