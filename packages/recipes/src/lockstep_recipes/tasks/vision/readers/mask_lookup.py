"""Convert the values in a mask file to class numbers with lookup tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.images.mask import MaskValues, as_ids
from lockstep_recipes.tasks.vision.readers.class_table import ClassTable, Color, listed, unknown_class

IGNORED = -1
"""The class number of pixels that do not belong to a class."""
_UNKNOWN = -2
_DIRECT = 2**16  # ids below this number are looked up in an array
_SHOWN = 5


def class_numbers(table: ClassTable, names: Sequence[str] | None) -> list[int]:
    """The number of each class of `table` among `names`.

    Args:
        names: the classes of the training data. None: those of the table.

    Raises:
        DataError: a class is not among `names`.
    """
    if names is None:
        return list(range(len(table.classes)))
    unknown = [name for name in table.names if name not in names]
    if unknown:
        more = f", and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        what = f"class {unknown[0]!r} is not among the {len(names)} classes of the training data{more}"
        remedy = unknown_class(unknown[0], names, "Ignore this class, or train with it")
        raise DataError(what, where=table.where, remedy=remedy)
    return [names.index(name) for name in table.names]


class MaskLookup:
    """Class numbers of the values in mask files.

    Args:
        table: the meaning of the values.
        names: the classes of the training data; the numbers are indices into this list. None: those of `table`.
        palette: the colour of each class in the palette of the first training mask, by name. If the table has no
            colours, a pixel with the colour of a different class belongs to that class: some tools number colours in
            the order in which they occur. None: ids mean the same in all masks, as with `masks: ids`.

    Raises:
        DataError: a class of `table` is not among `names`.
    """

    def __init__(
        self, table: ClassTable, names: Sequence[str] | None = None, palette: Mapping[str, Color] | None = None
    ) -> None:
        self.table = table
        by_color = palette is not None and table.masks is None and not self._has_colors
        self.named_palette = palette if by_color else None
        known = self.named_palette or {}
        self.palette = {entry.id: known[entry.name] for entry in table.classes if entry.name in known}
        numbers = class_numbers(table, names)
        known = [*zip(table.classes, numbers, strict=True), *((entry, IGNORED) for entry in table.ignored)]
        ids = {entry.id: number for entry, number in known if entry.color is None or entry.id >= 0}
        colors = {_packed(entry.color): number for entry, number in known if entry.color is not None}
        self._ids, self._colors = _Places(ids), _Places(colors)
        self._tables = (self._ids, self._colors)
        self._direct = np.full(_DIRECT, _UNKNOWN, dtype=np.int16)
        small = [number for number in ids if 0 <= number < _DIRECT]
        self._direct[small] = [ids[number] for number in small]

    def __call__(self, mask: MaskValues, *, where: str) -> npt.NDArray[np.int16]:
        """The class number of each pixel, or -1: (height, width).

        Args:
            where: the mask, for messages.

        Raises:
            DataError: a value is neither a class nor ignored; the file has colours, but the table has none; or the
                palette of the file contradicts the colours of the table. The error names the value.
        """
        mask = self.meant(mask)
        if mask.in_color:
            return self._of_colors(mask.values, where)
        if mask.palette is not None and self._has_colors:
            if self.table.masks == "colors":
                return self._of_colors(mask.palette[np.minimum(mask.values, len(mask.palette) - 1)], where)
            if self.table.masks is None:
                self._check_palette(mask.values, mask.palette, where)
        return self._of_ids(self.renumbered(mask, where), where)

    def meant(self, mask: MaskValues) -> MaskValues:
        """The mask, or the ids of a grey mask that was saved as RGB if the classes have no colours."""
        return mask if self._has_colors else as_ids(mask)

    def renumbered(self, mask: MaskValues, where: str) -> Array:
        """The ids of a mask as the first training mask numbers their colours.

        Raises:
            DataError: a colour of a class is different from that in the first training mask, and not that of a class.
        """
        first, own = self.palette, mask.palette
        if not first or own is None:
            return mask.values
        used = np.flatnonzero(np.bincount(mask.values.reshape(-1), minlength=256)[: len(own)]).tolist()
        colors: dict[int, Color] = {number: tuple(own[number].tolist()) for number in used}
        by_color = {color: number for number, color in first.items()}
        numbers = np.arange(256, dtype=np.uint8)
        for number, color in colors.items():
            if color not in by_color and number in first:
                what = f"id {number} has the colour {list(color)} in the palette of this mask, but "
                what += f"{list(first[number])} in that of the first training mask"
                remedy = "write `masks: ids` into a class file if the ids are correct: lockstep --explain segmentation"
                raise DataError(what, where=where, remedy=f"{remedy}. Otherwise give the colours of the classes there")
            numbers[number] = by_color.get(color, number)
        return mask.values if np.array_equal(numbers, np.arange(256)) else numbers[mask.values]

    def numbers(self) -> str:
        """The class numbers of all ids and colours as text, which changes if the meaning of a file changes."""
        tables = [list(zip(table.keys.tolist(), table.numbers.tolist(), strict=True)) for table in self._tables]
        return f"{tables}{self.table.masks}{self.palette or ''}"

    @property
    def _has_colors(self) -> bool:
        return any(entry.color is not None for entry in self.table.classes)

    def _of_ids(self, values: Array, where: str) -> npt.NDArray[np.int16]:
        numbers = self._direct[values] if values.dtype in (np.uint8, np.uint16) else self._ids(values)
        if (numbers == _UNKNOWN).any():
            unknown = numbers == _UNKNOWN
            found = np.unique(values[unknown])
            row, column = (int(place[0]) for place in np.nonzero(unknown))
            shown = listed([str(value) for value in found], _SHOWN)
            what = (
                f"the mask contains {shown}, which does not belong to a class: {int(unknown.sum())} pixels, the "
                f"first in row {row}, "
            )
            raise DataError(f"{what}column {column}", where=where, remedy=self._remedy(found))
        return numbers

    def _remedy(self, found: Array) -> str:
        classes, ignored = self.table.classes, self.table.ignored
        known = listed([f"{entry.id} ({entry.name})" for entry in classes])
        ignores = f", ignored ids are {listed([str(entry.id) for entry in ignored])}" if ignored else ""
        value = int(found[0])
        remedy = f"classes are {known}{ignores}. Name the class in {self.table.where}, or set task.ignore=[{value}]"
        if found.tolist() == [255] and [entry.id for entry in classes] == [0, 1]:
            first, second = self.table.names
            return f"if 255 means {second}, set task.classes='{{{first}: 0, {second}: 255}}'. Otherwise: {remedy}"
        return remedy

    def _of_colors(self, values: Array, where: str) -> npt.NDArray[np.int16]:
        if not self._has_colors:
            what = "the mask is a colour image, but the classes have no colours"
            remedy = f"give them in {self.table.where}: {{sky: [128, 128, 128], ...}}; or save masks of ids"
            raise DataError(what, where=where, remedy=remedy)
        wide = values.astype(np.int32)
        packed = (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]
        numbers = self._colors(packed)
        unknown = numbers == _UNKNOWN
        if unknown.any():
            found, counts = np.unique(packed[unknown], return_counts=True)
            often = found[np.argsort(-counts, kind="stable")][:_SHOWN]
            shown = ", ".join(str([int(value) >> 16, int(value) >> 8 & 255, int(value) & 255]) for value in often)
            row, column = (int(place[0]) for place in np.nonzero(unknown))
            more = ", ..." if len(found) > _SHOWN else ""
            what = f"the mask contains {len(found)} colours that do not belong to a class: {shown}{more}"
            what += f" ({int(unknown.sum())} pixels, the first in row {row}, column {column})"
            remedy = (
                f"give each colour a class in {self.table.where}, or add it to task.ignore. Many such colours mean "
            )
            raise DataError(what, where=where, remedy=f"{remedy}that the mask was resized or compressed: save it again")
        return numbers

    def _check_palette(self, values: Array, palette: Array, where: str) -> None:
        """Raise DataError if a used id has the colour of a different class: one of the two must be wrong."""
        meant = {entry.color: entry for entry in (*self.table.classes, *self.table.ignored) if entry.color is not None}
        by_id = {entry.id: entry for entry in (*self.table.classes, *self.table.ignored)}
        suspect: list[tuple[int, Color]] = []
        for number, color in enumerate(map(tuple, palette.tolist())):
            by_color, own = meant.get(color), by_id.get(number)
            if by_color and own and by_color is not own and own.color != color:
                suspect.append((number, color))
        if not suspect:
            return
        used = np.bincount(values.reshape(-1), minlength=256)
        for number, color in suspect:
            if used[number]:
                by_id_, other = by_id[number].name, meant[color].name
                what = f"id {number} is {by_id_!r}, but its colour in the palette, {list(color)}, is {other!r}'s"
                remedy = "write `masks: ids` into the class file if the ids are correct, otherwise `masks: colors`"
                raise DataError(what, where=where, remedy=remedy)


class _Places:
    """A function from integers to class numbers, for integers of any size."""

    def __init__(self, numbers: dict[int, int]) -> None:
        keys = sorted(numbers)
        self.keys = np.array(keys, dtype=np.int64)
        self.numbers = np.array([numbers[key] for key in keys], dtype=np.int16)

    def __call__(self, values: Array) -> npt.NDArray[np.int16]:
        if not len(self.keys):
            return np.full(values.shape, _UNKNOWN, dtype=np.int16)
        places = np.searchsorted(self.keys, values).clip(max=len(self.keys) - 1)
        return np.where(self.keys[places] == values, self.numbers[places], np.int16(_UNKNOWN))


def _packed(color: Color) -> int:
    return color[0] << 16 | color[1] << 8 | color[2]
