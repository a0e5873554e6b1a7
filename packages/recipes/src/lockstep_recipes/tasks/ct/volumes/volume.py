"""A CT volume in one fixed orientation, and the conversion from voxels with an affine matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.arrays import Array

REMEDY = "pip install nibabel pydicom"
_TILT_DEGREES = 0.5  # smaller angles come from rounded positions
_UNEVEN = 0.05  # fraction of the slice distance; smaller differences come from rounded positions
_LEAST, _GREATEST = np.iinfo(np.int16).min, np.iinfo(np.int16).max


@dataclass(frozen=True)
class Volume:
    """A CT volume.

    The orientation is that of an axial DICOM series. Slices go from feet to head, rows from the front of the patient to
    the back, columns from the right of the patient to the left.
    """

    slices: npt.NDArray[np.int16]
    """int16 (slices, rows, columns) in Hounsfield units (HU)."""
    spacing: tuple[float, float, float]
    """Distances in millimetres: between slices (the median), rows and columns."""
    positions: npt.NDArray[np.float32]
    """float32 (slices): distance of each slice from the first slice in millimetres, along the normal of the slices.
    Ascending."""
    notes: tuple[str, ...] = ()
    """Remarks: gantry tilt, uneven distances, duplicate or missing slices, assumptions."""


def oriented(voxels: Array, affine: Array, *, where: str, positions: Array | None = None) -> Volume:
    """Make a volume from voxels in any orientation. Axes are permuted and flipped; voxels are never interpolated.

    Args:
        voxels: (i, j, k) numbers in HU.
        affine: (4, 4) from voxel indices to millimetres, to the right, the front and the head (RAS), as in NIfTI.
        where: the file or folder, for errors. positions: (k) ascending positions of slices along k in millimetres, if
            distances may be uneven. None: slice distances come from `affine`.

    Raises:
        DataError: the voxels are not a volume (see `hounsfield`), the matrix has no orientation, or distances are
            uneven along an axis other than the one nearest to the axis of the body.
    """
    nibabel = optional("nibabel", "nibabel is needed to read volumes", where=where, remedy=REMEDY)
    if voxels.ndim == 4 and voxels.shape[3] == 1:
        voxels = voxels[..., 0]
    if voxels.ndim != 3 or not voxels.size:
        remedy = "give a file for each volume, with three axes"
        raise DataError(f"voxels of shape {voxels.shape} are not a volume", where=where, remedy=remedy)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        rows = np.asarray(affine).round(4).tolist()
        raise DataError(f"the affine matrix has no orientation: {rows}", where=where, remedy="write the file again")
    transform = nibabel.orientations.ornt_transform(
        nibabel.orientations.io_orientation(affine), nibabel.orientations.axcodes2ornt(("L", "P", "S"))
    )
    turned = nibabel.orientations.apply_orientation(voxels, transform).transpose(2, 1, 0)
    matrix = affine @ nibabel.orientations.inv_ornt_aff(transform, voxels.shape)
    across, down, along = matrix[:3, 0], matrix[:3, 1], matrix[:3, 2]
    normal = np.cross(across, down)
    distance = abs(float(along @ normal)) / float(np.linalg.norm(normal))
    places = distance * np.arange(len(turned))
    if positions is not None and transform[2, 0] == 2:
        places = positions - positions[0] if transform[2, 1] > 0 else (positions[-1] - positions)[::-1]
    elif positions is not None and _is_uneven(np.diff(positions)):
        remedy = "give an axial series, or a series with even distances"
        raise DataError("the slices are not axial, and their distances are uneven", where=where, remedy=remedy)
    steps = np.diff(places)
    usual = float(np.median(steps)) if len(steps) else distance
    spacing = (usual, float(np.linalg.norm(down)), float(np.linalg.norm(across)))
    is_axial = positions is None or transform[2, 0] == 2  # the order of axes in a NIfTI file has no meaning
    return replace(volume_of(turned, places, spacing, where=where), notes=_notes(is_axial, along, distance, steps))


def volume_of(values: Array, positions: Array, spacing: tuple[float, float, float], *, where: str) -> Volume:
    """Make a volume from slices that already have the orientation of `Volume`.

    Raises:
        DataError: see `hounsfield`.
    """
    return Volume(hounsfield(values, where=where), spacing, np.ascontiguousarray(positions, dtype=np.float32))


def hounsfield(values: Array, *, where: str) -> npt.NDArray[np.int16]:
    """Values as int16, rounded. Values outside the range of int16 are clipped.

    Raises:
        DataError: the values are not numbers, some are NaN or infinite, or all are equal.
    """
    if values.dtype.kind not in "iuf":
        remedy = "give a volume with one number for each voxel"
        raise DataError(f"voxels of type {values.dtype} are not Hounsfield units", where=where, remedy=remedy)
    hounsfield_units = np.empty(values.shape, dtype=np.int16)
    wrong = 0
    for plane, kept in zip(
        values, hounsfield_units, strict=True
    ):  # slice by slice, so that a large volume is in memory only once
        if values.dtype.kind == "f":
            wrong += plane.size - int(np.isfinite(plane).sum())
            plane = np.rint(np.nan_to_num(plane))
        np.clip(plane, _LEAST, _GREATEST, out=kept, casting="unsafe")
    if wrong:
        what = f"{wrong:,} of {values.size:,} voxels are NaN or infinite"
        raise DataError(what, where=where, remedy="repair the volume, or remove its row from the table")
    if (value := hounsfield_units.flat[0]) == hounsfield_units.max() == hounsfield_units.min():
        what = f"all {values.size:,} voxels have the value {value}"
        raise DataError(what, where=where, remedy="the volume is empty: repair it, or remove its row from the table")
    return hounsfield_units


def _is_uneven(steps: Array) -> bool:
    return len(steps) > 1 and bool(np.ptp(steps) > _UNEVEN * np.median(steps))


def _notes(is_axial: bool, along: Array, distance: float, steps: Array) -> tuple[str, ...]:
    notes = []
    if not is_axial:
        notes.append("the series is not axial: axial slices are taken through its voxels")
    tilt = math.degrees(math.acos(min(1.0, distance / float(np.linalg.norm(along)))))
    if tilt > _TILT_DEGREES:
        notes.append(f"the gantry was tilted by {tilt:.1f} degrees; this is not corrected")
    if _is_uneven(steps):
        notes.append(f"distances between slices are uneven: {steps.min():.2f} to {steps.max():.2f} mm")
    return tuple(notes)
