"""Read a CT series from DICOM files: a folder becomes a volume, or an error explains why not."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.ct.volumes.volume import REMEDY, Volume, oriented

_SAME_PLACE_MM = 0.01  # slices that are closer together are at the same position
_GAP = 1.5  # a distance above this many median distances means missing slices
_SHIFTED_MM = 1.0  # slices farther from the line through the first and the last slice are shifted
_NUMBERS = {"ImagePositionPatient": 3, "ImageOrientationPatient": 6, "PixelSpacing": 2, "Rows": 1, "Columns": 1}
_NEEDED = (*_NUMBERS, "PixelData")
_RESCALE = ("RescaleSlope", "RescaleIntercept")
_OBLIQUE = 0.05  # maximum deviation from 1 of the length of the normal
_SUFFIXES = (".dcm", ".dicom", ".ima")  # files with these suffixes are DICOM, or damaged
_SHOWN = 3
_AIR = -1000  # HU
_PADDING = ("PixelPaddingValue", "PixelPaddingRangeLimit")


def read_dicom(folder: Path, *, allow_gaps: bool = False) -> Volume:
    """The volume of the single CT series in a folder, at any depth.

    Slices are sorted by their position along the normal of the slices (ImagePositionPatient), whatever their file names
    and instance numbers are. RescaleSlope and RescaleIntercept are applied slice by slice. These are notes: identical
    slices at the same position (one is used), gantry tilt, slices that are shifted to the side, and files that are not
    DICOM (they are left out).

    Args:
        allow_gaps: whether missing slices are a note instead of an error. `Volume.positions` shows the gaps.

    Raises:
        DataError: there is no slice; there are several series (named) or a modality other than CT; a file is truncated
            or has no usable position, or has several frames; slices differ in size, distance of pixels or direction;
            only some slices have a slope or an intercept; two different slices are at the same
            position; slices are missing; voxels are all equal.
    """
    slices, notes = _one_series(folder)
    _check_alike(slices)
    if not _all_rescaled(slices):
        notes.append("slices have no RescaleSlope or RescaleIntercept: 1 and 0 are used")
    normal = _normal(slices[0])
    corners = np.stack([_numbers(dataset, "ImagePositionPatient") for dataset in slices])
    order = np.argsort(corners @ normal, kind="stable")
    slices, corners = [slices[place] for place in order], corners[order]
    planes = np.stack([_values(dataset) for dataset in slices])
    if padded := sum(_is_padded(dataset) for dataset in slices):
        notes.append(f"{padded} slices have padding (PixelPaddingValue) that would be brighter than air: it is now air")
    kept = _without_doubles(slices, planes, corners @ normal)
    if len(kept) < len(slices):
        notes.append(f"{len(slices) - len(kept)} duplicate slices are left out")
    planes, corners = planes[kept], corners[kept]
    positions = corners @ normal
    gaps = _gaps(positions)
    if gaps and not allow_gaps:
        remedy = "complete the series; or set task.allow_gaps=true, if the remaining slices are sufficient"
        raise DataError(gaps, where=str(folder), remedy=remedy)
    notes += [gaps] if gaps else []
    if (shift := _shift(corners, positions)) > _SHIFTED_MM:
        notes.append(f"slices are shifted to the side by up to {shift:.1f} mm; this is not corrected")
    volume = oriented(
        planes.transpose(2, 1, 0), _affine(slices[0], corners, normal), where=str(folder), positions=positions
    )
    return replace(volume, notes=(*notes, *volume.notes))


def _one_series(folder: Path) -> tuple[list[Any], list[str]]:
    """The slices in a folder, and notes."""
    pydicom = optional("pydicom", "pydicom is needed to read DICOM", where=str(folder), remedy=REMEDY)
    series: dict[str, list[Any]] = defaultdict(list)
    others = bare = 0
    for path in dicom_files(folder):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pydicom warns about texts that are longer than the standard allows
                has_preamble = not _is_bare(path)
                dataset = pydicom.dcmread(path) if has_preamble else _read_bare(path)
                is_image = "Rows" in dataset or "PixelData" in dataset
                kind = str(dataset.file_meta.get("MediaStorageSOPClassUID", ""))
        except pydicom.errors.InvalidDicomError as error:
            if path.suffix.lower() in _SUFFIXES:
                raise _damaged(path, error) from error
            others += 1
            continue
        except Exception as error:  # a damaged file raises many kinds of errors
            raise _damaged(path, error) from error
        if not is_image and any(known.startswith(kind) for known in _ct_classes()):  # a file begins with its kind
            raise _damaged(path, EOFError("it ends before its pixels"))
        bare += is_image and not has_preamble
        if is_image:
            series[str(dataset.get("SeriesInstanceUID", "without number"))].append(dataset)
        else:
            others += 1
    if not series:
        remedy = "give a folder with the .dcm files of a series"
        raise DataError(f"the folder has no DICOM slice among {others} files", where=str(folder), remedy=remedy)
    if len(series) > 1:
        shown = "; ".join(_about(uid, datasets) for uid, datasets in sorted(series.items())[:_SHOWN])
        remedy = "put each series into its own folder"
        raise DataError(f"the folder has {len(series)} series: {shown}", where=str(folder), remedy=remedy)
    (slices,) = series.values()
    notes = [f"{others} files are not DICOM slices and are left out"] if others else []
    notes += [f"{bare} slices have no preamble of DICOM, but are read"] if bare else []
    return slices, notes


def _is_bare(path: Path) -> bool:
    """True if a file has no preamble and begins with an element of DICOM: group 2 or 8, and a small element number."""
    with path.open("rb") as file:
        head = file.read(132)
    return head[128:] != b"DICM" and head[:2] in (b"\x02\x00", b"\x08\x00") and head[3:4] in (b"\x00", b"\x01")


def _read_bare(path: Path) -> Any:
    """A data set without preamble, whose encoding pydicom guesses."""
    import pydicom
    from pydicom import uid

    dataset = pydicom.dcmread(path, force=True)
    if "TransferSyntaxUID" not in dataset.file_meta:
        implicit = dataset.original_encoding[0]
        dataset.file_meta.TransferSyntaxUID = uid.ImplicitVRLittleEndian if implicit else uid.ExplicitVRLittleEndian
    return dataset


def dicom_files(folder: Path) -> list[Path]:
    """The files in a folder at any depth, sorted, without hidden files and the index DICOMDIR."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "DICOMDIR")
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def is_dicom(path: Path) -> bool:
    """True if a path is a DICOM file by its name or by its first bytes."""
    if not path.is_file() or path.name.startswith(".") or path.name == "DICOMDIR":
        return False
    if path.suffix.lower() in _SUFFIXES or _is_bare(path):
        return True
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _about(uid: str, datasets: Sequence[Any]) -> str:
    description = str(datasets[0].get("SeriesDescription", "")).strip()
    return f"{uid}{f' ({description!r})' if description else ''} with {len(datasets)} slices"


def _ct_classes() -> tuple[str, ...]:
    """The kinds of DICOM files that contain CT slices."""
    from pydicom import uid

    return uid.CTImageStorage, uid.EnhancedCTImageStorage, uid.LegacyConvertedEnhancedCTImageStorage


def _check_alike(slices: Sequence[Any]) -> None:
    """Check that all slices are CT, have positions, and have the same geometry."""
    first = slices[0]
    for dataset in slices:
        where = str(dataset.filename)
        if _count(dataset, "NumberOfFrames") > 1 or _count(dataset, "SamplesPerPixel") > 1:
            remedy = "convert it to NIfTI, or to one file per slice"
            raise DataError("a file with several frames or colours cannot be read", where=where, remedy=remedy)
        missing = [name for name in _NEEDED if _value(dataset, name) is None]
        if missing:
            raise DataError(f"the file has no {', '.join(missing)}", where=where, remedy="export the series again")
        if dataset.get("Modality", "CT") != "CT":
            raise DataError(f"the modality is {dataset.Modality}, not CT", where=where, remedy="give a CT series")
        _numbers(dataset, "ImagePositionPatient")
        for name, most in (("Rows", 0.0), ("Columns", 0.0), ("PixelSpacing", 1e-3), ("ImageOrientationPatient", 1e-3)):
            value, other = _numbers(dataset, name), _numbers(first, name)
            if np.abs(value - other).max() > most:
                what = f"{name} is {value.tolist()}, but {other.tolist()} in {Path(first.filename).name}"
                raise DataError(what, where=where, remedy="remove slices of a different size, such as localizers")


def _all_rescaled(slices: Sequence[Any]) -> bool:
    """True if slices have a slope and an intercept.

    Raises:
        DataError: only some slices have one of these values.
    """
    lacking = [[dataset for dataset in slices if name not in dataset] for name in _RESCALE]
    for name, without in zip(_RESCALE, lacking, strict=True):
        if 0 < len(without) < len(slices):
            what = f"the file has no {name}, but other slices do, so their values cannot be compared"
            raise DataError(what, where=str(without[0].filename), remedy="export the series again")
    return not any(lacking)


def _value(dataset: Any, name: str) -> Any:
    """A header entry; None if it is missing or blank.

    Raises:
        DataError: the entry cannot be read.
    """
    try:
        return dataset[name].value if name in dataset else None
    except Exception as error:  # text that is not a number
        raise _damaged(Path(dataset.filename), error) from error


def _count(dataset: Any, name: str) -> int:
    """A number of frames or colours; 1 if the file does not contain it."""
    return int(_value(dataset, name) or 1)


def _numbers(dataset: Any, name: str, usual: float | None = None) -> Array:
    """The numbers of a header entry, float64 (numbers).

    Args:
        usual: the default for a missing entry.

    Raises:
        DataError: the entry contains something else. The error names the file.
    """
    if usual is not None and name not in dataset:
        return np.array([usual])
    written, wanted = _value(dataset, name), _NUMBERS.get(name, 1)
    try:
        values = np.atleast_1d(np.array(written, dtype=np.float64))
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != (wanted,) or not np.isfinite(values).all():
        what = f"{name} is {written!r}, not {wanted} number{'s' if wanted > 1 else ''}"
        raise DataError(what, where=str(dataset.filename), remedy="export the series again")
    return values


def _normal(dataset: Any) -> Array:
    """The normal of a slice, of length 1.

    Raises:
        DataError: the directions of rows and columns are not perpendicular, or not of length 1.
    """
    directions = _numbers(dataset, "ImageOrientationPatient")
    normal = np.cross(directions[:3], directions[3:])
    length = float(np.linalg.norm(normal))
    if abs(length - 1) > _OBLIQUE:
        what = f"ImageOrientationPatient is {directions.tolist()}, which are not perpendicular directions of length 1"
        raise DataError(what, where=str(dataset.filename), remedy="export the series again")
    return normal / length


def _shift(corners: Array, positions: Array) -> float:
    """The largest distance in millimetres of a slice's corner from the line through the first and the last corner.

    Gantry tilt leaves the corners on a line.
    """
    length = float(positions[-1] - positions[0])
    if len(corners) < 3 or not length:
        return 0.0
    line = corners[0] + (positions - positions[0])[:, None] / length * (corners[-1] - corners[0])
    return float(np.linalg.norm(corners - line, axis=1).max())


def _values(dataset: Any) -> Array:
    """The pixels of a slice in HU, rounded: int16 (rows, columns)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pixels: Array = dataset.pixel_array
    except Exception as error:  # truncated data, or a compression that needs a missing package
        raise _damaged(Path(dataset.filename), error) from error
    (slope,), (intercept,) = (_numbers(dataset, name, usual) for name, usual in zip(_RESCALE, (1, 0), strict=True))
    if not slope:
        what = f"RescaleSlope is {slope:g} and RescaleIntercept is {intercept:g}"
        raise DataError(what, where=str(dataset.filename), remedy="export the series again")
    limits = np.iinfo(np.int16)
    values: Array = np.rint(pixels * slope + intercept).clip(limits.min, limits.max).astype(np.int16)
    if (padding := _padding(dataset)) is not None:
        values[(padding[0] <= pixels) & (pixels <= padding[1]) & (values > _AIR)] = _AIR
    return values


def _padding(dataset: Any) -> tuple[int, int] | None:
    """The smallest and the largest stored value that means no measurement. None: there is no such value.

    Source: DICOM PS3.3, C.7.5.1.1.2. Some files write the value of signed pixels as an unsigned number.
    """
    known = [int(value) for name in _PADDING if (value := _value(dataset, name)) is not None]
    if not known or _value(dataset, _PADDING[0]) is None:
        return None
    bits = int(_value(dataset, "BitsAllocated") or 16)
    lowest = -(1 << bits - 1) if _value(dataset, "PixelRepresentation") else 0
    known = [(value - lowest) % (1 << bits) + lowest for value in known]
    return min(known), max(known)


def _is_padded(dataset: Any) -> bool:
    """True if a slice has padding that would be brighter than air."""
    if (padding := _padding(dataset)) is None:
        return False
    (slope,), (intercept,) = (_numbers(dataset, name, usual) for name, usual in zip(_RESCALE, (1, 0), strict=True))
    pixels = dataset.pixel_array  # decoded before, and kept by pydicom
    return bool(((padding[0] <= pixels) & (pixels <= padding[1]) & (pixels * slope + intercept > _AIR)).any())


def _without_doubles(slices: Sequence[Any], planes: Array, positions: Array) -> list[int]:
    """The indices of the slices, without those that repeat the previous slice."""
    kept = [0]
    for place in range(1, len(slices)):
        if positions[place] - positions[kept[-1]] > _SAME_PLACE_MM:
            kept.append(place)
        elif not np.array_equal(planes[place], planes[kept[-1]]):
            one, other = (Path(slices[number].filename) for number in (kept[-1], place))
            what = f"two different slices at the position {positions[place]:.2f} mm: {one.name} and {other.name}"
            raise DataError(what, where=str(other.parent), remedy="keep one reconstruction in the folder")
    return kept


def _gaps(positions: Array) -> str | None:
    """A description of where slices are missing, or None."""
    steps = np.diff(positions)
    if len(steps) < 2:
        return None
    median = float(np.median(steps))
    wide = np.flatnonzero(steps > _GAP * median)
    if not len(wide):
        return None
    missing = sum(round(float(step) / median) - 1 for step in steps[wide])
    shown = ", ".join(f"{positions[place]:.1f} and {positions[place + 1]:.1f} mm" for place in wide[:_SHOWN])
    more = " and elsewhere" if len(wide) > _SHOWN else ""
    return f"about {missing} slices are missing: between {shown}{more}, at a usual distance of {median:.2f} mm"


def _affine(first: Any, corners: Array, normal: Array) -> Array:
    """From voxel indices (column, row, slice) to millimetres in RAS.

    Source: DICOM PS3.3, C.7.6.2.1.1. DICOM coordinates increase to the left and the back (LPS).
    """
    directions = _numbers(first, "ImageOrientationPatient")
    down, across = _numbers(first, "PixelSpacing").tolist()
    if len(corners) > 1:
        step = (corners[-1] - corners[0]) / (len(corners) - 1)
    else:
        step = normal * float(first.get("SliceThickness") or 1.0)
    matrix = np.eye(4)
    matrix[:3] = np.stack([directions[:3] * across, directions[3:] * down, step, corners[0]], axis=1)
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ matrix


def _damaged(path: Path, error: BaseException) -> DataError:
    reason = str(error).split("\n")[0] or type(error).__name__
    remedy = "the file is truncated or damaged, or its compression needs a package (pip install 'pylibjpeg[all]')"
    return DataError(f"not readable as DICOM: {reason}", where=str(path), remedy=remedy)
