"""Images that are listed in a table, and images in the columns of a data set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.columns import LABEL, check_header, named, note_on_groups, usual
from lockstep_recipes.tasks.readers.input_files import with_slashes
from lockstep_recipes.tasks.readers.labels import groups_of, single_labels
from lockstep_recipes.tasks.readers.table import Source, Table
from lockstep_recipes.tasks.vision.readers.image_files import ImageFiles, add_file, missing_files

if TYPE_CHECKING:
    from lockstep_recipes.tasks.vision.classification.options import ClassificationColumnsOptions

IMAGE = ("image", "img", "path", "file", "filename", "file_name", "filepath", "file_path", "image_path", "picture")
"""Usual names of columns with images or their paths."""
FOLDER = "folder"
"""The group of an image is its folder."""
_FOR_LISTS = "give each image one label, or set task.columns.label to a different column"

Column = str | int | None


class TablePlaces:
    """The place of each row of a table, for messages."""

    def __init__(self, table: Table) -> None:
        self.name, self.by_line = table.name, table.lines is not None
        self.lines = np.arange(len(table)) if table.lines is None else np.array(table.lines, dtype=np.int64)

    def __call__(self, row: int) -> str:
        return f"{self.name}:{self.lines[row]}" if self.by_line else f"{self.name}, row {self.lines[row]}"


def read_paths(
    source: Source, given: ClassificationColumnsOptions
) -> tuple[ImageFiles, Array, list[str], tuple[str, ...], Array | None]:
    """The images that a table lists by path, class numbers, names of classes, notes, and groups.

    Args:
        source: a table file. Paths in it are relative to its folder.
        image, label: columns by name or index. None: the column with a usual name.

    Raises:
        DataError: the table cannot be read, has no such column, or lacks a label or an image. The error names file
            and line.
    """
    table = source.read()
    columns = list(table.columns)
    target = _column(given.label, columns, usual_names=LABEL, role="label", where=table.name)
    left = [name for name in columns if name != target]
    path = _column(given.image, left, usual_names=IMAGE, role="image", where=table.name)
    values, classes, places = table.columns[target], table.classes.get(target), TablePlaces(table)
    if source.name.endswith((".csv", ".tsv")):
        check_header(given.label, target, values, table.name)
    names, codes = single_labels(values, classes, column=target, where=places, for_lists=_FOR_LISTS)
    root = Path(source.name).parent
    paths, notes = with_slashes(root, table.columns[path])
    _check_paths(paths, root=root, column=path, place=places)
    groups = None
    images = ImageFiles(root, paths, places)
    if given.group == FOLDER and FOLDER not in columns:
        groups = folders_of(images)
    elif given.group is not None:
        column = named(given.group, columns, "group", table.name)
        groups = groups_of(table.columns[column], column=column, where=places)
    return images, codes, names, (*table.notes, *notes, *note_on_groups(given.group, table.columns)), groups


def folders_of(images: ImageFiles) -> Array:
    """The folder of each image."""
    return np.array([os.path.dirname(images.path(index)) for index in range(len(images))])


def _column(given: Column, names: Sequence[str], *, usual_names: Sequence[str], role: str, where: str) -> str:
    if given is not None:
        return named(given, names, role, where)
    found = usual(usual_names, names, role=role, where=where, names=names, needed=True)
    assert found is not None
    return found


def _check_paths(values: Sequence[Any], *, root: Path, column: str, place: TablePlaces) -> None:
    """Raise DataError for the first row whose file is missing."""
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value.strip():
            what = f"no path in column {column!r}: {value!r}"
            raise DataError(what, where=place(row), remedy="fill in the path, or remove the row")
    missing = missing_files([os.path.join(root, value) for value in values])
    if not missing:
        return
    first = missing[0]
    path = os.path.join(root, values[first])
    folder, name = os.path.split(path)
    hint = did_you_mean(name, os.listdir(folder)) if os.path.isdir(folder) else f"there is no folder {folder}. "
    more = f" ({len(missing)} of {len(values)} rows name missing files)" if len(missing) > 1 else ""
    remedy = f"{hint}Paths are relative to the folder of the table, {root}; task.columns.image is {column!r}"
    raise DataError(f"there is no file {path}{more}", where=place(first), remedy=remedy)


class DataSetImages:
    """Encoded images in a column of a `datasets.Dataset`, which does not decode them.

    Args:
        data: a data set with one column.
        column: its name.
        name: the source, for messages.
    """

    def __init__(self, data: Any, column: str, name: str) -> None:
        self.data, self.column, self.source = data, column, name

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> bytes:
        value = self.data[index][self.column]
        if value and value.get("bytes"):
            return bytes(value["bytes"])
        path = value and value.get("path")
        remedy = "fill in the image, or remove the row"
        if not path:
            raise DataError(f"no image in column {self.column!r}", where=self.where(index), remedy=remedy)
        try:
            return Path(path).read_bytes()
        except OSError as error:
            what = f"the image {path} cannot be read: {error.strerror}"
            raise DataError(what, where=self.where(index), remedy=remedy) from error

    def size(self, index: int) -> int | None:
        """The bytes of an image, without reading it. None: there is no image."""
        column, row = self.data.data.column(self.column), index
        if self.data._indices is not None:  # the data set was shuffled or filtered
            row = self.data._indices.column(0)[index].as_py()
        value = column[row]
        held = value["bytes"] if value.is_valid else None
        if held is not None and held.is_valid:
            return int(held.as_buffer().size)
        try:
            return os.stat(value["path"].as_py()).st_size
        except (OSError, TypeError):
            return None

    def name(self, index: int) -> str:
        return f"row {index}"

    def where(self, index: int) -> str:
        return f"{self.source}, row {index}"

    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.data._fingerprint}|{self.column}|{len(self)}|".encode())
        for file in self.data.cache_files:
            add_file(digest, file["filename"], name=os.path.realpath(file["filename"]))
        for path in self._paths():
            add_file(digest, path, name=path)
        return digest.hexdigest()

    def _paths(self) -> Iterator[str]:
        """The files of the images that the data set names by path. Images with bytes are not read here."""
        for chunk in self.data.data.column(self.column).chunks:
            held, paths = chunk.field("bytes"), chunk.field("path")
            if held.null_count:
                yield from paths.filter(held.is_null()).drop_null().to_pylist()


def read_data_set(
    data: Any, given: ClassificationColumnsOptions, *, name: str
) -> tuple[DataSetImages, Array, list[str], tuple[str, ...], Array | None]:
    """The images of a `datasets.Dataset`, class numbers, names of classes, notes (none), and groups.

    Args:
        image: a column of type Image, by name or index. None: the only one, or the one with a usual name.
        label: a column with labels. None: the column with a usual name.
        name: the source, for messages.

    Raises:
        DataError: there is no such column, or a label is missing. The error names the row.
    """
    column = image_column(data, given.image, role="image", usual_names=IMAGE, name=name)
    left = [other for other in data.features if other != column]
    target = _column(given.label, left, usual_names=LABEL, role="label", where=name)
    values = data.select_columns([target]).with_format(None).to_dict()[target]
    kind = data.features[target]
    classes = list(kind.names) if getattr(kind, "names", None) else None
    names, codes = single_labels(
        values, classes, column=target, where=lambda row: f"{name}, row {row}", for_lists=_FOR_LISTS
    )
    groups = None
    if given.group is not None:
        shared = named(given.group, list(data.features), "group", name)
        values = data.select_columns([shared]).with_format(None).to_dict()[shared]
        groups = groups_of(values, column=shared, where=lambda row: f"{name}, row {row}")
    return data_set_images(data, column, name=name), codes, names, (), groups


def image_column(
    data: Any, given: Column, *, role: str, usual_names: Sequence[str], name: str, other: str | None = None
) -> str:
    """The name of a column with images.

    Args:
        data: a `datasets.Dataset`.
        given: the column by name or index. None: the only column of type Image, or the one with a usual name.
        role: the key in `task.columns`, for errors.
        usual_names: the usual names of such columns, in lower case.
        name: the source, for messages.
        other: a column that has another role.

    Raises:
        DataError: there is no such column, or it does not contain images.
    """
    from datasets import Image

    columns = [column for column in data.features if column != other]
    found = [column for column in columns if isinstance(data.features[column], Image)]
    if given is not None:
        column = named(given, list(data.features), role, name)
    elif len(found) == 1:
        column = found[0]
    else:
        column = _column(None, found or columns, usual_names=usual_names, role=role, where=name)
    if column not in found:
        what = f"column {column!r} contains {data.features[column]}, not images"
        listed = f"set task.columns.{role} to one of: {', '.join(found)}"
        remedy = listed if found else f"cast it first: data.cast_column({column!r}, datasets.Image())"
        raise DataError(what, where=name, remedy=remedy)
    return column


def data_set_images(data: Any, column: str, *, name: str) -> DataSetImages:
    """The images in a column of a `datasets.Dataset`."""
    from datasets import Image

    encoded = data.select_columns([column]).with_format(None).cast_column(column, Image(decode=False))
    return DataSetImages(encoded, column, name)


def holds_images(path: Path) -> bool:
    """True if a Parquet file contains images (a column of `bytes` and `path`), not only their paths."""
    try:
        import pyarrow.parquet
    except ImportError:
        return False  # the table reader reports what to install
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (OSError, pyarrow.ArrowException):
        return False  # the table reader reports the fault
    kinds = [field.type for field in schema]
    return any(pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 for kind in kinds)
