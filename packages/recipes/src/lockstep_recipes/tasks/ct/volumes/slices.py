"""The slices of a volume, which stay on disk until they are used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError

Voxels = npt.NDArray[np.int16]


class Slices:
    """int16 (slices, rows, columns) in Hounsfield units, in memory or in a .npy file. Both behave alike.

    `slices[7]`, `slices[3:9]` and `slices[places]` with an array of integers read only these slices. The file is read
    rather than memory-mapped: for a mapped file that is not in the page cache, Linux reads much more than each slice,
    and a disk error kills the process.

    Args:
        source: the voxels, or the path of the file.

    Raises:
        DataError: the file cannot be read.
    """

    dtype = np.dtype(np.int16)
    ndim = 3

    def __init__(self, source: Voxels | Path) -> None:
        self._source = source
        self._offset = 0
        self.shape: tuple[int, int, int]
        """(slices, rows, columns)."""
        if isinstance(source, Path):
            try:
                with source.open("rb") as file:
                    np.lib.format.read_magic(file)
                    self.shape, _, _ = np.lib.format.read_array_header_1_0(file)  # type: ignore[assignment]
                    self._offset = file.tell()
            except (OSError, ValueError) as error:
                raise self._damaged(error) from error
        else:
            self.shape = source.shape

    @property
    def size(self) -> int:
        """Number of voxels."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: Any) -> Voxels:
        """Slices in a new array: (rows, columns) for an integer, otherwise (chosen, rows, columns).

        Raises:
            IndexError: there is no such slice.
            DataError: the file cannot be read.
        """
        chosen = np.arange(len(self))[places]
        if not isinstance(self._source, Path):
            return np.array(self._source[chosen])
        voxels: Voxels = np.empty((*chosen.shape, *self.shape[1:]), dtype=np.int16)
        planes = voxels.reshape(-1, *self.shape[1:])
        length = planes[:1].nbytes
        try:
            handle = os.open(self._source, os.O_RDONLY)
            try:
                for plane, place in zip(planes, chosen.reshape(-1).tolist(), strict=True):
                    if os.preadv(handle, [plane.data], self._offset + place * length) != length:
                        raise EOFError("the file is too short")
            finally:
                os.close(handle)
        except (OSError, EOFError) as error:
            raise self._damaged(error) from error
        return voxels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self[:] if dtype is None else self[:].astype(dtype)

    def tobytes(self) -> bytes:
        """All voxels, for digests."""
        return self[:].tobytes()

    def _damaged(self, error: BaseException) -> DataError:
        remedy = "delete its folder: Lockstep then reads the volume from its source again"
        return DataError(f"a cached volume cannot be read: {error}", where=str(self._source), remedy=remedy)
