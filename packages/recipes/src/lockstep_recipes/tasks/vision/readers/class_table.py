"""The classes of a segmentation: their names, their ids and colours in mask files, and the ids that are ignored."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.readers.encodings import read_text
from lockstep_recipes.tasks.readers.yaml_names import load_names

Color = tuple[int, int, int]
ClassesOption = str | Sequence[str] | Mapping[Any, Any] | None
"""`task.classes`: a file, names, or the content of a class file."""

CLASS_FILES = ("classes.yaml", "classes.json", "classes.txt", "id2label.json", "label_colors.txt")
"""Names of class files that are found next to masks."""
_PARTS = ("train", "val", "valid", "test", "path")
"""Keys with paths in the description of a data set."""
_KEYS = ("classes", "ignore", "ignore_index", "colors", "masks")
_COLOR_LINE = re.compile(r"(\d+)[\s,]+(\d+)[\s,]+(\d+)[\s,]+(.+)")


@dataclass(frozen=True)
class ClassEntry:
    """A class of mask files, or an ignored value."""

    name: str
    id: int
    """The number of the class in files with ids. Numbers may have gaps."""
    color: Color | None = None
    """The colour (red, green, blue) of the class in files with colours."""


@dataclass(frozen=True)
class ClassTable:
    """Meanings of the values in mask files. The number of a class is its index in `classes`."""

    classes: tuple[ClassEntry, ...]
    ignored: tuple[ClassEntry, ...] = ()
    """Pixels of these ids or colours do not belong to a class."""
    masks: Literal["ids", "colors"] | None = None
    """The meaning of palette files: ids, or colours of classes. None: ids, unless the colours of the palette
    contradict."""
    where: str = "task.classes"
    """The file or key that the table was read from, for messages."""

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.classes]

    def colors(self, palette: Any = None) -> list[Color]:
        """A colour to draw each class: its own, that of its id in `palette`, or a default colour.

        Args:
            palette: the colours of a mask file by id, (ids, 3), or None.
        """
        places = range(0 if palette is None else len(palette))
        found = []
        for number, entry in enumerate(self.classes):
            color = entry.color
            if color is None and palette is not None and entry.id in places:
                red, green, blue = (int(value) for value in palette[entry.id])
                color = (red, green, blue)
            found.append(color or usual_color(number))
        if len(set(found)) < len(found):  # a palette without colours for some ids
            own = [entry.color for entry in self.classes]
            return [color or usual_color(number) for number, color in enumerate(own)]
        return found

    def with_ignored(self, ignore: Sequence[Any], *, where: str) -> ClassTable:
        """The same table, with additional ignored names, ids or colours.

        Raises:
            DataError: a name is unknown, or no class remains.
        """
        classes, ignored = list(self.classes), list(self.ignored)
        for item in ignore:
            found = [entry for entry in classes if _is(entry, item)]
            classes = [entry for entry in classes if entry not in found]
            if found or any(_is(entry, item) for entry in ignored):
                ignored += found
            else:
                ignored.append(_ignored_entry(item, [*self.names, *(entry.name for entry in ignored)], where))
        if self.classes and not classes:
            raise DataError("every class is ignored", where=where, remedy="leave at least one class")
        return replace(self, classes=tuple(classes), ignored=tuple(ignored))


def read_class_table(classes: ClassesOption) -> ClassTable:
    """The table from a list of names, a mapping or a file.

    | content | meaning |
    |---|---|
    | `[sky, road]` | names, with the ids 0, 1, ... |
    | `{sky: [128, 128, 128], road: [128, 64, 128]}` | names with colours, and the ids 0, 1, ... |
    | `{background: 0, nucleus: 255}` | names with ids |
    | `{sky: {id: 7, color: [128, 128, 128]}}` | names with ids and colours |
    | `{0: sky, 1: road}` | names by id |
    | `{classes: ..., ignore: [void, 255], colors: {...}, masks: ids}` | the full form; see below |
    | `{train: ..., val: ..., names: [sky, road]}` | the `data.yaml` of a YOLO data set: its names |

    `ignore` has names, ids or colours whose pixels do not belong to a class; `ignore_index: 255` is the same as
    `ignore: [255]`. `masks` tells whether palette files contain `ids` or `colors`. A file is YAML or JSON with such
    content, or text with a name in each line, or `red green blue name`.

    Raises:
        DataError: the file cannot be read; a name, an id or a colour is given twice or is invalid; there is no class.
            The error names file or key, and the value.
    """
    where = classes if isinstance(classes, str) else "task.classes"
    table = _parse(_read_file(Path(classes)) if isinstance(classes, str) else classes, where)
    if not table.classes:
        raise DataError("there are no classes", where=where, remedy="name the classes")
    return table


def is_foreign(path: Path) -> bool:
    """True for a file that describes the folders of a data set (`train: images/train`), but not its classes."""
    try:
        content = _read_file(path)
    except DataError:  # reading it again reports the error
        return False
    return isinstance(content, Mapping) and _has_folders(content) and not {"names", "classes", "colors"} & set(content)


def _has_folders(content: Mapping[Any, Any]) -> bool:
    """True if `train`, `val` or a similar key has one or several paths, which a class cannot have."""
    places = [content[key] for key in _PARTS if key in content]
    paths = [item for place in places for item in (place if isinstance(place, list) else [place])]
    return bool(paths) and all(isinstance(path, str) for path in paths)


def usual_color(number: int) -> Color:
    """A colour for the class of a number: the colour map of PASCAL VOC. Neighbouring numbers have very different
    colours; 0 is black.

    Source: Everingham et al., The PASCAL Visual Object Classes development kit, 2012, `VOClabelcolormap`.
    """
    channels = [0, 0, 0]
    for bit in range(8):
        for channel in range(3):
            channels[channel] |= (number >> (3 * bit + channel) & 1) << (7 - bit)
    return channels[0], channels[1], channels[2]


# ---- reading


def _read_file(path: Path) -> Any:
    if not path.is_file():
        near = [name.name for name in path.parent.iterdir()] if path.parent.is_dir() else []
        remedy = f"{did_you_mean(path.name, near)}Give a file (.yaml, .json, .txt), or a list of names"
        raise DataError("there is no such file of classes", where=str(path), remedy=remedy)
    text = read_text(path)
    if path.suffix.lower() == ".txt":
        return _lines(text, str(path))
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else load_names(text)
    except (ValueError, yaml.YAMLError) as error:
        what = f"this is not valid {path.suffix.lstrip('.').upper()}: {' '.join(str(error).split())}"
        raise DataError(what, where=str(path), remedy="correct the file") from error


def _lines(text: str, where: str) -> list[str] | dict[str, list[int]]:
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    found = {number: _COLOR_LINE.fullmatch(line) for number, line in lines.items()}
    if not any(found.values()):
        return list(lines.values())
    colors: dict[str, list[int]] = {}
    for number, match in found.items():
        if match is None:
            what = f"{lines[number]!r} has no colour, but other lines do"
            remedy = "write `red green blue name` in each line, or only a name in each line"
            raise DataError(what, where=f"{where}, line {number}", remedy=remedy)
        name = match[4].strip()
        if name in colors:
            remedy = "give each class its own name"
            what = f"the name {name!r} is given to several classes"
            raise DataError(what, where=f"{where}, line {number}", remedy=remedy)
        colors[name] = [int(match[place]) for place in (1, 2, 3)]
    return colors


def _of_yolo(content: Any, where: str) -> Any:
    """The names in the description of a YOLO data set (`data.yaml`), which also contains its folders; otherwise
    `content`."""
    if not isinstance(content, Mapping) or not {"train", "val", "nc"} & set(content) or "colors" in content:
        return content
    if any(not isinstance(content[key], str | list | int) for key in ("train", "val", "nc") if key in content):
        return content
    names = content.get("names", content.get("classes"))
    by_id = isinstance(names, Mapping) and all(_as_id(key) is not None for key in names)
    if by_id or (isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names)):
        return {"classes": names}
    if any(isinstance(content.get(key), str) for key in ("train", "val")):
        what = "this describes the folders of a YOLO data set, but does not have a list `names` of its classes"
        raise DataError(what, where=where, remedy="add `names: [...]`, or write a class file with a name in each line")
    return content


def _parse(content: Any, where: str) -> ClassTable:
    content = _of_yolo(content, where)
    if isinstance(content, Mapping) and not ("classes" in content and set(content) <= set(_KEYS)):
        of_keys = "classes" in content and not isinstance(content["classes"], int)
        key = next(key for key in content if key not in _KEYS) if of_keys else _misspelt(content)
        if key is not None:
            remedy = f"{did_you_mean(key, _KEYS)}The keys are {', '.join(_KEYS)}"
            raise DataError(f"unknown key {key!r}", where=where, remedy=remedy)
        content = {"classes": content}
    if not isinstance(content, Mapping):
        content = {"classes": content}
    entries = _entries(content["classes"], where)
    entries = _with_colors(entries, content.get("colors") or {}, where)
    masks = content.get("masks")
    if masks not in (None, "ids", "colors"):
        raise DataError(f"masks is {masks!r}", where=where, remedy="write `masks: ids` or `masks: colors`")
    _check_unique(entries, where)
    ignore = content.get("ignore")
    ignore = [] if ignore is None else ignore if isinstance(ignore, list | tuple) else [ignore]
    if content.get("ignore_index") is not None:
        ignore = [*ignore, content["ignore_index"]]
    return ClassTable(entries, masks=masks, where=where).with_ignored(ignore, where=where)


def _misspelt(content: Mapping[Any, Any]) -> str | None:
    """A key that resembles `classes`, with a value that a class cannot have. None: there is none."""
    for key, value in content.items():
        lists_names = isinstance(value, list | tuple) and any(isinstance(item, str) for item in value)
        maps_names = isinstance(value, Mapping) and not set(value) & {"id", "color"}
        if (lists_names or maps_names) and did_you_mean(key, ["classes"]):
            return str(key)
    return None


def _entries(classes: Any, where: str) -> tuple[ClassEntry, ...]:
    if isinstance(classes, Mapping):
        if classes and all(_as_id(key) is not None for key in classes):
            by_id = sorted((int(key), name) for key, name in classes.items())
            return tuple(ClassEntry(_name(name, where), number) for number, name in by_id)
        return tuple(_entry(name, value, place, where) for place, (name, value) in enumerate(classes.items()))
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        remedy = "give a list of names, or a mapping from names to colours or ids"
        raise DataError(f"the classes are {classes!r}", where=where, remedy=remedy)
    return tuple(ClassEntry(_name(name, where), place) for place, name in enumerate(classes))


def _entry(name: Any, value: Any, place: int, where: str) -> ClassEntry:
    name = _name(name, where)
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in ("id", "color")]
        number = _as_id(value.get("id", place))
        if unknown or number is None:
            what = f"class {name!r} is {dict(value)!r}"
            raise DataError(what, where=where, remedy="write {id: 7, color: [128, 64, 128]}; an id is 0 or more")
        color = value.get("color")
        return ClassEntry(name, number, None if color is None else _color(color, name, where))
    if isinstance(value, list | tuple):
        return ClassEntry(name, place, _color(value, name, where))
    number = _as_id(value)
    if number is None:
        remedy = "give a colour [red, green, blue], an id of 0 or more, or {id: 7, color: [128, 64, 128]}"
        raise DataError(f"class {name!r} is {value!r}", where=where, remedy=remedy)
    return ClassEntry(name, number)


def _with_colors(entries: tuple[ClassEntry, ...], colors: Any, where: str) -> tuple[ClassEntry, ...]:
    if not isinstance(colors, Mapping):
        raise DataError(f"colors is {colors!r}", where=where, remedy="write {NAME: [red, green, blue], ...}")
    names = [entry.name for entry in entries]
    unknown = [name for name in colors if name not in names]
    if unknown:
        remedy = f"{did_you_mean(unknown[0], names)}The classes are {listed(names)}"
        raise DataError(f"colors has {unknown[0]!r}, which is not a class", where=where, remedy=remedy)
    return tuple(
        replace(entry, color=_color(colors[entry.name], entry.name, where)) if entry.name in colors else entry
        for entry in entries
    )


def _name(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        remedy = "put the name into quotes: YAML reads yes, no, on and off as true and false"
        raise DataError(f"{value!r} is not a class name", where=where, remedy=remedy)
    return str(value).strip()


def _as_id(value: Any) -> int | None:
    """The id from a number or its text. None: it is not an id."""
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, str) and value.isdecimal())):
        return None
    return int(value) if 0 <= int(value) < 2**31 else None


def _color(value: Any, name: str, where: str) -> Color:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= 255 for part in value)
    ):
        remedy = "give red, green and blue from 0 to 255, such as [128, 64, 128]"
        raise DataError(f"the colour of {name!r} is {value!r}", where=where, remedy=remedy)
    return value[0], value[1], value[2]


def _check_unique(entries: Sequence[ClassEntry], where: str) -> None:
    colors = [entry.color for entry in entries if entry.color is not None]
    fields: dict[str, Sequence[Any]] = {
        "name": [entry.name for entry in entries],
        "id": [entry.id for entry in entries],
        "colour": colors,
    }
    for field, values in fields.items():
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            what = f"the {field} {twice[0]!r} is given to several classes"
            raise DataError(what, where=where, remedy=f"give each class a different {field}")


# ---- what is ignored


def _is(entry: ClassEntry, item: Any) -> bool:
    if isinstance(item, list | tuple):
        return entry.color is not None and list(entry.color) == list(item)
    if isinstance(item, str):
        return entry.name == item
    return entry.id == item and not isinstance(item, bool) and entry.id >= 0


def _ignored_entry(item: Any, names: Sequence[str], where: str) -> ClassEntry:
    """An ignored id or colour that has no name."""
    if isinstance(item, list | tuple):
        return ClassEntry("ignored", -1, _color(item, "ignored", where))
    if isinstance(item, int) and not isinstance(item, bool):
        return ClassEntry("ignored", item)
    remedy = f"{did_you_mean(item, names)}Give an id, a colour, or one of the classes: {listed(names)}"
    raise DataError(f"ignore has {item!r}, which is not a class", where=where, remedy=remedy)


def unknown_class(name: Any, names: Sequence[str], advice: str) -> str:
    """The remedy for a class that is not among those of the training data."""
    return f"{did_you_mean(name, names)}The classes are: {listed(names)}. {advice}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
