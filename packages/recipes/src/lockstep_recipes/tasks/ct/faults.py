"""Finders for CT volumes: see `lockstep_recipes.look`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import DataFinding, Extent
from lockstep_recipes.tasks.arrays import Array

_BRIGHTEST = np.iinfo(np.int16).max
_FEW = 0.25
"""A scan with less than this share of the usual number of slices is odd."""
_SIMILAR, _ENOUGH, _RARE = 1.5, 5, 0.25
"""Numbers of slices are similar within this factor; scans for a judgement; the share of odd scans at most."""
_TOLD = ("may not be Hounsfield", "no preamble", "PixelPadding", "no orientation", "are missing", "1 mm apart")
"""Parts of the reader's notes that are findings."""


@dataclass(frozen=True)
class VolumeFacts:
    """What one volume shows."""

    index: int
    file: str
    error: DataError | None = None
    key: str = ""
    slices: int = 0
    length: float = 0
    """Millimetres from the first to the last slice."""
    brightest: float = 0
    """The share of voxels with the largest value that a volume can hold."""
    notes: tuple[str, ...] = ()


@dataclass
class VolumeSplit:
    """The volumes of a split."""

    name: str
    table: Any
    """A `volume_table.VolumeTable`."""
    extent: Extent

    @cached_property
    def facts(self) -> list[VolumeFacts]:
        """The facts of the volumes that are opened: none for the head of a log, because a volume takes long."""
        if self.extent.is_short:
            return []
        most = len(self.table) if self.extent.samples is None else min(len(self.table), self.extent.samples)
        return [self._facts(number * len(self.table) // most) for number in range(most)]

    def _facts(self, index: int) -> VolumeFacts:
        file = f"{self.table.places[index]} ({self.table.paths[index]})"
        try:
            sample = self.table[index]
            values = sample.slices[np.arange(0, len(sample.positions), max(1, len(sample.positions) // 8))]
        except DataError as error:
            return VolumeFacts(index, file, error)
        brightest = float((values == _BRIGHTEST).mean())
        length = float(sample.positions[-1] - sample.positions[0])
        return VolumeFacts(index, file, None, sample.key, len(sample.positions), length, brightest, sample.notes)

    def middle(self, index: int) -> Array:
        """The slice in the middle, for the page: uint8 (rows, columns, 3)."""
        sample = self.table[index]
        values = sample.slices[np.array([len(sample.positions) // 2])][0].astype(np.float32)
        grey = ((values + 1000) / 2000 * 255).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)


def unreadable(data: Sequence[VolumeSplit]) -> Iterator[DataFinding]:
    """Volumes that cannot be used."""
    for split in data:
        for one in split.facts:
            if one.error is not None:
                file = f"{one.file}: {one.error.where}" if one.error.where else one.file
                yield DataFinding("error", "unreadable", file, one.error.what, one.error.remedy or "correct the file")


def remarks(data: Sequence[VolumeSplit]) -> Iterator[DataFinding]:
    """What the reader assumed or corrected."""
    for split in data:
        for one in split.facts:
            for note in one.notes:
                if any(part in note for part in _TOLD):
                    remedy = "export the scan again, if this is not meant"
                    image = partial(split.middle, one.index)
                    yield DataFinding("warning", "volume-note", one.file, note, remedy, image)


def odd_volumes(data: Sequence[VolumeSplit]) -> Iterator[DataFinding]:
    """Padding that is brighter than bone, and scans of few slices."""
    for split in data:
        usual = float(np.median([one.slices for one in split.facts if one.error is None] or [0]))
        for one in split.facts:
            image = partial(split.middle, one.index)
            if one.brightest > 0:
                what = f"{one.brightest:.2%} of the voxels have the largest value, {_BRIGHTEST} HU: is it padding?"
                yield DataFinding("warning", "bright-padding", one.file, what, "replace padding by -1000 HU", image)
            if one.error is None and one.slices < _FEW * usual:
                what = f"the scan has {one.slices} slices, usually there are {usual:.0f}"
                yield DataFinding("warning", "few-slices", one.file, what, "complete the scan, or remove it", image)


def odd_lengths(data: Sequence[VolumeSplit]) -> Iterator[DataFinding]:
    """Scans that are much shorter or longer than others with a similar number of slices."""
    known = [(split, one) for split in data for one in split.facts if one.error is None and one.slices > 1]
    odd = []
    for split, one in known:
        similar = [other.length for _, other in known if 1 / _SIMILAR < other.slices / one.slices < _SIMILAR]
        usual = float(np.median(similar))
        if len(similar) >= _ENOUGH and not 0.5 * usual < one.length < 2 * usual:
            odd.append((split, one, usual))
    for split, one, usual in odd if len(odd) <= _RARE * len(known) else []:
        what = (
            f"its {one.slices} slices are {one.length / (one.slices - 1):.2f} mm apart, {one.length:.0f} mm in total; "
        )
        what += f"scans with a similar number of slices have {usual:.0f} mm"
        remedy = "is the distance of the slices right in the file?"
        yield DataFinding("warning", "odd-length", one.file, what, remedy, partial(split.middle, one.index))


def equal_volumes(data: Sequence[VolumeSplit]) -> Iterator[DataFinding]:
    """Equal volumes in training and evaluation, or with different labels."""
    groups: dict[str, list[tuple[VolumeSplit, VolumeFacts]]] = defaultdict(list)
    for split in data:
        for one in split.facts:
            if one.key:
                groups[one.key].append((split, one))
    for (first, one), *others in groups.values():
        for split, other in others:
            what, image = f"the same volume as {one.file}", partial(split.middle, other.index)
            if split is not first:
                remedy = "remove it from one of the two"
                yield DataFinding(
                    "error", "train-in-eval", other.file, f"an evaluation volume is {what}", remedy, image
                )
            elif not np.array_equal(first.table.labels[one.index], split.table.labels[other.index], equal_nan=True):
                remedy = "decide which labels are right"
                yield DataFinding(
                    "error", "label-conflict", other.file, f"{what}, with different labels", remedy, image
                )


FINDERS = (unreadable, remarks, odd_volumes, odd_lengths, equal_volumes)
