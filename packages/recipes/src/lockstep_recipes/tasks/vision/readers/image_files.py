"""Image files: a folder for each class, or files by name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.core.errors import SKIP, DataError, number_of
from lockstep.core.foreign_errors import reading
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.input_files import special_files
from lockstep_recipes.tasks.readers.packed_text import PackedText
from lockstep_recipes.tasks.vision.images.decode import image_size, reads_heif
from lockstep_recipes.tasks.vision.readers.class_table import listed, unknown_class

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
"""Suffixes of image files, in lower case. Files may write them in upper case (ImageNet's end in .JPEG)."""
HEIF_SUFFIXES = (".heic", ".heif")
"""Suffixes of files that are images if `pillow-heif` is installed."""
_OF_SYSTEMS = ("thumbs.db", "desktop.ini")  # files that file managers leave in folders
_SHOWN = 8
_HEAD = 65536  # bytes of a file that contain its size
_PNG_HEAD = 4096  # the same, for a PNG file
_PNG = b"\x89PNG\r\n\x1a\n"
_FEW = 32  # up to this many files of a folder are looked up one by one


class EncodedImages(Protocol):
    """Encoded images by index. Reading is safe in forked and in spawned loader workers."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """The file of an image, as it was written: JPEG, PNG, ...

        Raises:
            DataError: it cannot be read. The error names the file.
        """
        ...

    def name(self, index: int) -> str:
        """The name of an image in its source. It does not change if the source is moved to a different folder."""
        ...

    def where(self, index: int) -> str:
        """The place of an image, for messages."""
        ...

    def digest(self) -> str:
        """Hexadecimal digits that change if an image changes. They use path, size and times of the files, which are not
        read. Sources in different folders have different digits."""
        ...


class ImageFiles:
    """Images in files.

    Args:
        root: the folder that the names are relative to.
        names: paths below `root`, or absolute paths.
        place: returns the place of an image in messages by index. None: its path.
    """

    def __init__(self, root: Path, names: Sequence[str], place: Callable[[int], str] | None = None) -> None:
        self.root, self.names, self.place = root, PackedText(names), place

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """The path of an image."""
        return os.path.join("" if self.root == Path() else self.root, self.names[index])

    def read(self, index: int) -> bytes:
        try:
            with open(self.path(index), "rb") as file:
                return file.read()
        except OSError as error:
            remedy = f"check that the file is there, and its permissions, or {SKIP}"
            raise DataError(f"cannot be read: {error.strerror}", where=self.where(index), remedy=remedy) from error

    def name(self, index: int) -> str:
        return self.names[index]

    def where(self, index: int) -> str:
        return self.path(index) if self.place is None else f"{self.place(index)} ({self.path(index)})"

    def digest(self) -> str:
        # Names are relative to the folder: without it, images of a different folder with equal sizes and times look the
        # same.
        digest = hashlib.sha256(f"{os.path.realpath(self.root)!a}|".encode())
        for index in range(len(self)):
            add_file(digest, self.path(index), name=self.names[index])
        return digest.hexdigest()


def add_file(digest: Any, path: str | Path, *, name: str) -> None:
    """Add name, size and times of a file to a digest; for a missing file, only its name.

    Archives and reproducible builds set the modification time to a constant. The ctime cannot be set, so a file that
    replaces another one is noticed.
    """
    try:
        about = os.stat(path)
        digest.update(f"{name!a}|{about.st_size}|{about.st_mtime_ns}|{about.st_ctime_ns}|".encode())
    except OSError:
        digest.update(f"{name!a}|".encode())


def size_of_file(path: str, *, where: str | None = None) -> tuple[int, int]:
    """(height, width) in pixels of the upright image in a file. Only the start of the file is read if possible. A PNG
    file may have its orientation after the pixels.

    Args:
        where: the place of the image, for messages. None: its path.

    Raises:
        DataError: the file cannot be read, or is not an image.
    """
    where = path if where is None else where
    with reading(where), open(path, "rb") as file:
        head = file.read(_PNG_HEAD)
        if head.startswith(_PNG) and len(head) >= 24 and b"eXIf" not in head:
            return int.from_bytes(head[20:24], "big"), int.from_bytes(head[16:20], "big")
        with contextlib.suppress(DataError):
            head += file.read(_HEAD)
            return image_size(head, where=where)
        return image_size(head + file.read(), where=where)


def image_suffixes() -> tuple[str, ...]:
    """Suffixes of image files that can be read here, in lower case."""
    return SUFFIXES + HEIF_SUFFIXES if reads_heif() else SUFFIXES


def is_image(name: str) -> bool:
    """True if a file has the suffix of an image. Hidden files do not count: macOS puts `._name.jpg` next to
    `name.jpg`."""
    return name.lower().endswith(image_suffixes()) and not name.startswith(".")


def left_out(names: Iterable[str], where: Path) -> tuple[str, ...]:
    """A note that counts files that are not images by suffix. Empty: there are no such files.

    Hidden files, and files that file managers leave behind, are not counted.

    Args:
        names: the names of the files in `where`, including images.
    """
    others = [name for name in names if not is_image(name) and name[:1] != "." and name.lower() not in _OF_SYSTEMS]
    if not others:
        return ()
    counts = Counter(os.path.splitext(name)[1].lower() or "without a suffix" for name in others)
    often = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = listed([f"{count:,} {ending}" for ending, count in often])
    heif = "; pip install pillow-heif reads .heic" if any(kind in counts for kind in HEIF_SUFFIXES) else ""
    return (f"left out: {number_of(len(others), 'file')} below {where} without the suffix of an image: {shown}{heif}",)


def left_out_below(folders: Iterable[Path], *, labels: Sequence[str] = ()) -> tuple[str, ...]:
    """The notes of `left_out` for whole folders, at any depth.

    Args:
        labels: suffixes of files that belong to the images.
    """
    notes: list[str] = []
    for folder in folders:
        names = (name for _, _, files in os.walk(folder) for name in files if not name.lower().endswith(tuple(labels)))
        notes += left_out(names, folder)
    return tuple(notes)


def class_folders(root: Path) -> list[str]:
    """The names of the folders in `root`, sorted alphabetically as in torchvision and `datasets`, without hidden
    folders."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def read_class_folders(
    root: Path, classes: Sequence[str] | None
) -> tuple[ImageFiles, Array, list[str], tuple[str, ...]]:
    """The images in `root/CLASS/`, at any depth: images, the class number of each, class names, notes.

    Args:
        classes: the classes of the training data. None: the folders are the classes.

    Raises:
        DataError: there is no folder, a folder has no image, or the name of a folder is not in `classes`; or the
            folders are those of data for segmentation or detection.
    """
    folders = class_folders(root)
    if not folders:
        remedy = f"{root.name}/CLASS/NAME.jpg is expected: a folder for each class"
        raise DataError("there are no class folders", where=str(root), remedy=remedy)
    if (recipe := _other_recipe(folders)) is not None:
        shown = " and ".join(f"{name}/" for name in folders)
        what = f"the folders {shown} are not classes: this is data for the recipe `{recipe}`"
        remedy = f"train with `lockstep train {recipe}`; if these are two classes, rename the folders"
        raise DataError(what, where=str(root), remedy=remedy)
    known = list(classes) if classes is not None else folders
    unknown = [name for name in folders if name not in known]
    if unknown:
        more = f", and {number_of(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        what = f"class {unknown[0]!r} is not among the {len(known)} classes of the training data{more}"
        remedy = unknown_class(unknown[0], known, "Remove this folder, or train with it")
        raise DataError(what, where=str(root / unknown[0]), remedy=remedy)
    names: list[str] = []
    counts: list[int] = []
    others: list[str] = []
    for folder in folders:
        found = [f"{folder}/{name}" for name in images_below(root / folder, others)]
        if not found:
            raise DataError("a class folder has no images", where=str(root / folder), remedy=_remedy(root / folder))
        names += found
        counts.append(len(found))
    codes = np.repeat(np.array([known.index(folder) for folder in folders], dtype=np.int64), counts)
    with os.scandir(root) as entries:
        stray = sum(is_image(entry.name) for entry in entries)
    notes = (f"left out: {number_of(stray, 'image')} in {root} outside of a class folder",) if stray else ()
    return ImageFiles(root, names), codes, known, (*notes, *left_out(others, root))


def _other_recipe(folders: Sequence[str]) -> str | None:
    """The recipe that data with these folder names is meant for. None: the folders may be classes."""
    kinds = {"masks": "segmentation", "annotations": "detection", "labels": "detection"}
    names = [name.lower() for name in folders]
    return (
        kinds.get(next(name for name in names if name != "images")) if len(names) == 2 and "images" in names else None
    )


def _remedy(folder: Path) -> str:
    others = [name for _, _, files in os.walk(folder) for name in files if not name.startswith(".")]
    kinds = sorted({Path(name).suffix for name in others})
    found = f"its {number_of(len(others), 'file', 'ends', 'end')} in {', '.join(kinds[:_SHOWN])}. " if others else ""
    if {kind.lower() for kind in kinds} & set(HEIF_SUFFIXES):
        found += "pip install pillow-heif reads .heic. "
    return f"{found}Put images ({', '.join(image_suffixes())}) into the folder, or remove it"


def images_below(folder: Path, others: list[str] | None = None) -> list[str]:
    """Paths of the images in a folder, relative to it and sorted. Links to folders are followed, each folder once.
    Pipes and devices are left out.

    Args:
        others: collects the names of the files that are not images.
    """
    seen: set[str] = set()
    found: list[str] = []
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a parent folder would never end
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        prefix = "" if place == str(folder) else os.path.relpath(place, folder) + os.sep
        special = special_files(place)
        found += [prefix + name for name in files if is_image(name) and name not in special]
        if others is not None:
            others += [name for name in files if not is_image(name)]
    return sorted(found)


def missing_files(paths: Sequence[str]) -> list[int]:
    """The indices of the missing files, sorted.

    A folder with many files is listed once, because checking each file takes minutes on a network file system.
    """
    by_folder: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for place, path in enumerate(paths):
        folder, name = os.path.split(path)
        by_folder[folder or "."].append((place, name))
    return sorted(place for folder, files in by_folder.items() for place in _missing_in(folder, files))


def _missing_in(folder: str, files: Sequence[tuple[int, str]]) -> list[int]:
    there: set[str] = set()
    if len(files) > _FEW and os.path.isdir(folder):
        with os.scandir(folder) as entries:
            there = {entry.name for entry in entries if entry.is_file()}
    return [row for row, name in files if name not in there and not os.path.isfile(os.path.join(folder, name))]
