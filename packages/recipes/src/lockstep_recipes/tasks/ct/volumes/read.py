"""Read a CT volume: NIfTI, a folder with a DICOM series, or NumPy. The same scan gives the same volume from each."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.ct.volumes.dicom import read_dicom
from lockstep_recipes.tasks.ct.volumes.volume import REMEDY, Volume, oriented, volume_of

NIFTI = (".nii", ".nii.gz")
NUMPY = (".npy", ".npz")
SUFFIXES = (*NIFTI, *NUMPY)
"""Suffixes of files that contain a volume. A DICOM series is a folder."""
_REST = 1 << 20  # bytes to read at once


def read_volume(path: str | Path, *, allow_gaps: bool = False) -> Volume:
    """The volume in a file or folder.

    NIfTI: slope and intercept of the header are applied, and its affine matrix gives orientation and distances. DICOM:
    see `read_dicom`. NumPy: see `_read_numpy`.

    Args:
        path: a file with one of `SUFFIXES`, or the folder of a DICOM series.
        allow_gaps: whether missing slices of a DICOM series are a note of the volume instead of an error.

    Raises:
        DataError: there is no such path; the file is of another kind, damaged or truncated; voxels are NaN, or all are
            equal; a series cannot be used (see `read_dicom`). The error names the path.
    """
    path = Path(path)
    name = path.name.lower()
    if path.is_dir():
        volume = read_dicom(path, allow_gaps=allow_gaps)
    elif not path.is_file():
        remedy = "check the path; it is relative to the table"
        raise DataError("there is no such volume", where=str(path), remedy=remedy)
    elif name.endswith(NIFTI):
        volume = _read_nifti(path)
    elif name.endswith(NUMPY):
        volume = _read_numpy(path)
    else:
        remedy = f"give a file that ends in {', '.join(SUFFIXES)}, or the folder of a DICOM series"
        raise DataError("unknown file type for a volume", where=str(path), remedy=remedy)
    if volume.slices.min() >= 0:
        note = "no value is below 0, but air has -1000 HU: the values may not be Hounsfield units"
        volume = replace(volume, notes=(*volume.notes, note))
    return volume


def _read_nifti(path: Path) -> Volume:
    nibabel = optional("nibabel", "nibabel is needed to read NIfTI", where=str(path), remedy=REMEDY)
    try:
        image: Any = nibabel.load(path)
        voxels = _checked_voxels(path, image) if path.name.lower().endswith(".gz") else np.asanyarray(image.dataobj)
    except Exception as error:  # a damaged file raises many kinds of errors
        raise _damaged(path, "NIfTI", error) from error
    affine = np.array(image.affine, dtype=np.float64)
    unit = image.header.get_xyzt_units()[0] if hasattr(image.header, "get_xyzt_units") else "mm"
    affine[:3] *= {"meter": 1000.0, "micron": 0.001}.get(unit, 1.0)
    volume = oriented(voxels, affine, where=str(path))
    if hasattr(image.header, "get_sform") and not (image.header["sform_code"] or image.header["qform_code"]):
        note = "the header has no orientation: the axes are assumed to point to the left, the front and the head"
        return replace(volume, notes=(*volume.notes, note))
    return volume


def _checked_voxels(path: Path, image: Any) -> Array:
    """The voxels of a compressed file, which is read to its end because its checksum is there. nibabel itself stops
    after the last voxel, and does not notice changed bytes."""
    with gzip.open(path) as stream:
        voxels: Array = np.asanyarray(type(image).from_stream(stream).dataobj)
        while stream.read(_REST):
            pass
    return voxels


def _read_numpy(path: Path) -> Volume:
    """A volume of (slices, rows, columns) in HU, in the orientation of `Volume`.

    A .npz contains it as `slices` or as its only array with three axes, and may contain `spacing` (slices, rows,
    columns, in mm) and `positions` (of the slices, in mm). Without these, distances are assumed to be 1 mm.
    """
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged file open
            loaded = np.load(file, allow_pickle=False)
            is_single = isinstance(loaded, np.ndarray)
            arrays = {"slices": loaded} if is_single else {name: loaded[name] for name in loaded.files}
    except Exception as error:  # a damaged file raises many kinds of errors
        raise _damaged(path, "NumPy", error) from error
    solid = [name for name, array in arrays.items() if array.ndim == 3]
    name = "slices" if "slices" in arrays else solid[0] if len(solid) == 1 else None
    if name is None or arrays[name].ndim != 3 or not arrays[name].size:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        remedy = "give an array (slices, rows, columns); in a .npz name it `slices`"
        raise DataError(f"none of the arrays is a volume: {shapes}", where=str(path), remedy=remedy)
    values = arrays[name]
    spacing = np.asarray(arrays.get("spacing", (1.0, 1.0, 1.0)), dtype=np.float64)
    positions = np.asarray(arrays.get("positions", spacing.flat[0] * np.arange(len(values))), dtype=np.float64)
    if spacing.shape != (3,) or not (spacing > 0).all() or not np.isfinite(spacing).all():
        remedy = "give three positive numbers in mm: the distances of slices, rows and columns"
        raise DataError(f"spacing is {spacing.tolist()}", where=str(path), remedy=remedy)
    if positions.shape != (len(values),) or not (np.diff(positions) > 0).all() or not np.isfinite(positions).all():
        remedy = "give one position in mm for each slice, ascending from feet to head"
        raise DataError(f"positions of shape {positions.shape} do not ascend", where=str(path), remedy=remedy)
    if "positions" in arrays and len(values) > 1:
        spacing[0] = np.median(np.diff(positions))
    volume = volume_of(values, positions - positions[0], (spacing[0], spacing[1], spacing[2]), where=str(path))
    if "spacing" in arrays:
        return volume
    return replace(volume, notes=("the file has no `spacing`: rows and columns are assumed to be 1 mm apart",))


def _damaged(path: Path, kind: str, error: BaseException) -> DataError:
    reason = str(error).split("\n")[0] or type(error).__name__
    remedy = "the file is truncated or damaged: copy it again, or remove its row from the table"
    return DataError(f"not readable as {kind}: {reason}", where=str(path), remedy=remedy)
