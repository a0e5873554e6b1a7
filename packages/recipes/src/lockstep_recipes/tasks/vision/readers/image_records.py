"""Images with labels from folders, tables, data sets and tar shards, as map-style data sets of encoded images.

A sample is the encoded file of an image. `images.decode` decodes it; `readers.decoded_images` does so for a whole data
set, with a cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from lockstep.core.errors import DataError, did_you_mean
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.input_files import find_files
from lockstep_recipes.tasks.readers.labels import match_labels
from lockstep_recipes.tasks.readers.table import Source
from lockstep_recipes.tasks.vision.readers import image_files, image_shards, image_table
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages, ImageFiles

if TYPE_CHECKING:
    from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions

TRAIN = ("train", "training")
"""Names of a folder, or of a split, with training data."""
EVAL = ("val", "validation", "valid", "eval", "test")
"""Names of a folder, or of a split, with evaluation data. The first that exists is used."""
FOLDER = image_table.FOLDER
_TABLES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".ndjson")
_ARCHIVES = (".zip", ".7z", ".rar", ".gz", ".tgz", ".xz", ".bz2", ".zst")
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")  # `datasets` writes these into a folder

Split = Literal["train", "eval"]


class ImageRecord(NamedTuple):
    """A raw sample."""

    data: bytes
    """The encoded image: JPEG, PNG, ..."""
    label: int
    """The class number, or -1 if it is unknown."""
    name: str
    """The name of the image in its source."""


class ImageRecords(Dataset[ImageRecord]):
    """Encoded images with class numbers.

    Args:
        images: the images by index.
        labels: the class number of each, or -1: (images,).
        classes: the names of the classes.
        notes: remarks about how the source was read.
        groups: the group of each image, which stays on one side of the split: (images,) text. None: there are none.
    """

    def __init__(
        self,
        images: EncodedImages,
        labels: Array,
        classes: Sequence[str],
        notes: Sequence[str] = (),
        groups: Array | None = None,
    ) -> None:
        self.pictures, self.groups = images, groups
        self.labels: Array = labels.astype(np.int64, copy=False)
        """The class number of each image, or -1: (images,) int64."""
        self.classes = list(classes)
        """The names of the classes, by number."""
        self.names, self.codes = self.classes, self.labels  # the names that `match_labels` uses
        self.notes = tuple(notes)
        """Remarks about how the source was read."""

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> ImageRecord:
        """A sample.

        Raises:
            DataError: its file cannot be read. The error names the file.
        """
        return ImageRecord(self.pictures.read(index), int(self.labels[index]), self.pictures.name(index))

    def where(self, index: int) -> str:
        """The place of an image, for messages: a file, a row of a table, or a member of a shard."""
        return self.pictures.where(index)

    def digest(self) -> str:
        """Hexadecimal digits that change if an image changes. They use path, size and times of the files, which are not
        read. This takes seconds for a million files."""
        return self.pictures.digest()

    def part(self, rows: Array) -> ImageRecords:
        """The images at `rows`, (chosen images,) int64, in this order."""
        return ImageRecords(ImageSubset(self.pictures, rows), self.labels[rows], self.classes, self.notes)


class ImageSubset:
    """Some images of a source."""

    def __init__(self, pictures: EncodedImages, rows: Array) -> None:
        self.pictures, self.rows = pictures, rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        return self.pictures.read(int(self.rows[index]))

    def name(self, index: int) -> str:
        return self.pictures.name(int(self.rows[index]))

    def where(self, index: int) -> str:
        return self.pictures.where(int(self.rows[index]))

    def digest(self) -> str:
        return hashlib.sha256(self.pictures.digest().encode() + self.rows.astype("<i8").tobytes()).hexdigest()


def read_image_records(
    source: str, split: Split, options: ClassificationOptions, *, classes: Sequence[str] | None = None
) -> ImageRecords:
    """The images of a source, with labels.

    | source | samples |
    |---|---|
    | a folder | images in a folder for each class, at any depth |
    | a folder with `train/`, and `val/`, `validation/`, `valid/`, `eval/` or `test/` | those of one of these folders |
    | CSV, TSV, JSON (lines), Parquet | a row for each image: its path, relative to the table, and its label |
    | Parquet with embedded images | a row for each image |
    | `FOLDER[:SPLIT]` that `datasets` saved, `NAME[:SPLIT]` on the hub | a row for each image |
    | a .tar, a folder of them, `DIR/shard-{000..012}.tar`, `DIR/*.tar` | KEY.jpg with KEY.cls or KEY.json |

    Args:
        split: the split to read if a source has several and does not name one.
        options: its `columns`, `subset`, `header`, `delimiter` and `quoting`. For shards, `columns.label` is the field
            of KEY.json (None: `label`).
        classes: the class names of the training data; the labels are indices into this list. None: the classes of the
            source, sorted: folders alphabetically; other labels by value if all are numbers, otherwise alphabetically;
            a ClassLabel of a data set in its order.

    Raises:
        DataError: there is no such source; an image is missing (file and line); a class folder has no image; a
            label is missing, or is not in `classes`; a shard is damaged (shard and member). Nothing is decoded here.
    """
    records = _read(source, split, options, classes)
    if not len(records):
        raise DataError(f"data.{split} contains no images", where=source, remedy="give a source with images")
    if classes is None or records.classes == list(classes):
        return records
    return ImageRecords(records.pictures, match_labels(records, classes), classes, records.notes, records.groups)


def _read(source: str, split: Split, options: ClassificationOptions, classes: Sequence[str] | None) -> ImageRecords:
    """The images of a source with its own classes; for folders, with `classes` if given."""
    columns, path = options.columns, Path(source)
    field = "label" if columns.label is None else str(columns.label)
    if image_shards.names_shards(source):
        return _from_shards(source, field, columns.group)
    if source.lower().endswith(_TABLES) and not path.is_dir():
        if path.is_file() and path.suffix.lower() == ".parquet" and image_table.holds_images(path):
            return ImageRecords(*image_table.read_data_set(_from_parquet(source), columns, name=source))
        return ImageRecords(*image_table.read_paths(Source(source, **options.of_csv()), columns))
    if path.is_dir() and not is_saved_data_set(path):
        folder = part_of_folder(path, split) or path
        if image_shards.has_shards(folder):
            return _from_shards(str(folder), field, columns.group)
        if columns.group not in (None, FOLDER):
            what = f"a folder has no column {columns.group!r}"
            raise DataError(what, where="task.columns.group", remedy=f"set it to {FOLDER}, or give a table")
        found = image_files.read_class_folders(folder, classes)
        return ImageRecords(*found, groups=image_table.folders_of(found[0]) if columns.group == FOLDER else None)
    remedy = f"Give a folder with one folder per class, a table ({', '.join(_TABLES)}), or .tar shards"
    data, name = open_data_set(source, split, options.subset, what="images", remedy=remedy)
    return ImageRecords(*image_table.read_data_set(data, columns, name=name))


def _from_shards(source: str, field: str, group: str | int | None) -> ImageRecords:
    if group is not None:
        remedy = "give data.eval, with the groups that are for evaluation"
        raise DataError("shards have no groups", where="task.columns.group", remedy=remedy)
    return ImageRecords(*image_shards.read_shards(source, label=field))


def is_saved_data_set(folder: Path) -> bool:
    """True if `datasets` saved this folder."""
    return any((folder / name).is_file() for name in _SAVED)


def _from_parquet(source: str) -> Any:
    remedy = "pip install datasets, or write the images to files"
    datasets = optional("datasets", "`datasets` is needed to read images from Parquet", where=source, remedy=remedy)
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_parquet(source)
    for name, kind in data.features.items():
        if isinstance(kind, dict) and "bytes" in kind:  # written without the types of `datasets`
            data = data.cast_column(name, datasets.Image(decode=False))
    return data


def open_data_set(text: str, split: Split, subset: str | None, *, what: str, remedy: str) -> tuple[Any, str]:
    """The `datasets.Dataset` that a source names, and its name with its split, for messages.

    Args:
        text: a folder that `datasets` saved, or a name on the hub; both may name a split.
        split: the split to read if the source has several and does not name one.
        subset: configuration of a data set on the hub.
        what: what the source should contain, for the error message.
        remedy: the sources that are accepted in addition to data sets.

    Raises:
        DataError: the text is a path, but not a saved data set; there is no such data set or split.
    """
    source = Source.parse(text, split="", subset=subset)
    path = Path(source.name)
    is_path = (
        path.is_absolute() or text.startswith(".") or text.count("/") > 1
    )  # names on the hub do not look like this
    if path.is_file() or (is_path and not path.is_dir()):
        hint = did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() and not path.exists() else [])
        hint = "Unpack it first. " if path.is_file() and path.suffix.lower() in _ARCHIVES else hint
        fault = f"data.{split} is not a source of {what}" if path.exists() else "no such file or folder"
        raise DataError(fault, where=text, remedy=f"{hint}{remedy}")
    name = f"{source.name}:{source.split}" if source.split else source.name
    if not source.split:
        splits = saved_splits(path) if path.is_dir() else ["train", "validation"]
        wanted = TRAIN if split == "train" else EVAL
        chosen = next((part for part in wanted if part in splits), wanted[0])
        source, name = replace(source, split=chosen), f"{name}:{chosen}" if splits else name
    return source.data_set(), name


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder that `datasets` saved. Empty: it contains a single data set."""
    if not (folder / "dataset_dict.json").is_file():
        return []
    return [path.name for path in folder.iterdir() if path.is_dir()]


def part_of_folder(folder: Path, split: Split) -> Path | None:
    """The folder of a split inside a folder of images, or None if the folder is not divided into splits.

    A folder `train` without folders and shards in it is a class (of vehicles), not a split.

    Raises:
        DataError: the folder has only the other split.
    """
    parts: dict[Split, Path] = {}
    for name, names in (("train", TRAIN), ("eval", EVAL)):
        for inner in names:
            path = folder / inner
            if path.is_dir() and (image_files.class_folders(path) or image_shards.has_shards(path)):
                parts[name] = path  # type: ignore[index]
                break
    if not parts or split in parts:
        return parts.get(split)
    (other,) = parts.values()
    wanted = ", ".join(f"{name}/" for name in (TRAIN if split == "train" else EVAL))
    what = f"there is {other.name}/, but none of {wanted}"
    raise DataError(what, where=str(folder), remedy=f"add one of them, or give {other} directly")


def evaluation_source(train: str) -> str | None:
    """The source of evaluation data that belongs to a source of training data, for a config without `data.eval`.

    Returns:
        the same folder if it has a folder `val`, `validation`, `valid`, `eval` or `test` next to `train`, or such a
        split (of a folder that `datasets` saved). Otherwise None.
    """
    folder = Path(train)
    if not folder.is_dir():
        return None
    if is_saved_data_set(folder):
        splits = saved_splits(folder)
        return next((f"{train}:{name}" for name in EVAL if name in splits), None)
    try:
        parts = [part_of_folder(folder, split) for split in ("train", "eval")]
    except DataError:
        return None
    return train if all(parts) else None


def unlabelled_images(arguments: Sequence[str]) -> ImageRecords:
    """Images to predict: files, folders (all images below), patterns such as `DIR/**/*.jpg`, and tar shards.

    The labels are -1. The order is that of the arguments, and within one of them that of the paths.

    Raises:
        DataError: shards and files are mixed.
        UsageError: an argument does not name anything.
    """
    shards = [argument for argument in arguments if image_shards.names_shards(argument)]
    if shards:
        if len(arguments) > 1:
            remedy = "give one .tar or one pattern of them, or image files and folders"
            raise DataError("shards cannot be combined with other arguments", where=shards[0], remedy=remedy)
        pictures, codes, _, notes = image_shards.read_shards(shards[0], label="label", labelled=False)
        return ImageRecords(pictures, np.full(len(codes), -1), [], notes)
    paths = [str(path) for path in find_files(arguments, image_files.image_suffixes())]
    notes = image_files.left_out_below(path for path in map(Path, arguments) if path.is_dir())
    return ImageRecords(ImageFiles(Path(), paths), np.full(len(paths), -1), [], notes)
