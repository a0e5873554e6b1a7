"""Which mask belongs to which image: the usual names of their folders and files."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.vision.readers.image_files import ImageFiles, images_below

IMAGES, MASKS = "images", "masks"
"""Names of the folders with images, and with their masks."""
ARRAYS = (".npy",)
"""Suffixes of masks that are arrays of NumPy."""
_OTHER_IMAGES = ("image", "imgs", "img", "jpegimages")
_OTHER_MASKS = ("mask", "labels", "annotations", "segmentations", "segmentationclass", "ground_truth", "gt")
_ENDINGS = tuple(
    mark + word
    for mark in ("_", "-", ".")
    for word in (
        "mask",
        "masks",
        "segmentation",
        "seg",
        "label",
        "labels",
        "labelids",
        "gt",
        "groundtruth",
        "annotation",
    )
)
_IMAGE_ENDINGS = tuple(mark + word for mark in ("_", "-", ".") for word in ("image", "img", "leftimg8bit", "sat"))


def mask_folder(folder: Path) -> Path | None:
    """The folder of the masks: `masks`, or one with a similar name that has images or arrays. None: there is none."""
    return _folder(folder, MASKS, _OTHER_MASKS)


def image_folder(folder: Path) -> Path | None:
    """The folder of the images: `images`, or one with a similar name that has images. None: there is none."""
    return _folder(folder, IMAGES, _OTHER_IMAGES)


def _folder(folder: Path, usual: str, others: tuple[str, ...]) -> Path | None:
    if (folder / usual).is_dir():
        return folder / usual
    there = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else {}
    return next((there[name] for name in others if name in there and files_below(there[name])), None)


def files_below(folder: Path) -> list[str]:
    """The images and arrays below a folder, sorted."""
    others: list[str] = []
    found = images_below(folder, others)
    if not any(name.endswith(ARRAYS) for name in others):
        return found
    arrays = (path for suffix in ARRAYS for path in folder.rglob(f"*{suffix}") if not path.name.startswith("."))
    return sorted([*found, *(os.path.relpath(path, folder) for path in arrays)])


Pairs = tuple[ImageFiles, ImageFiles, tuple[str, ...]]
"""Images, their masks, and notes."""


def read_mask_folder(folder: Path, part: str = "") -> Pairs:
    """The images in `folder/images` and their masks in `folder/masks`, at any depth, in the order of the names; and
    notes.

    A mask has the name of its image; suffixes may differ. If no mask has, all masks may have the same usual ending:
    `a_mask.png` for `a.jpg`. The folders may have other usual names.

    Args:
        part: read `folder/images/PART` and `folder/masks/PART` instead.

    Raises:
        DataError: one of the folders is missing; there is no image; an image has no mask; a mask has no image; or two
            files of a folder differ only in the suffix. The error names the file.
    """
    found = (image_folder(folder) or folder / IMAGES, mask_folder(folder) or folder / MASKS)
    inside = [place / part for place in found]
    for place in inside:
        if not place.is_dir():
            what = f"there is no folder {place.relative_to(folder)}/"
            remedy = f"put images into {inside[0]}, and for each a mask with the same name into {inside[1]}"
            raise DataError(what, where=str(folder), remedy=remedy)
    notes = [
        f"{'images' if usual == IMAGES else 'masks'} are read from {place.name}/"
        for place, usual in zip(found, (IMAGES, MASKS), strict=True)
        if place.name != usual
    ]
    images, masks = map(_by_stem, inside)
    if not images:
        raise DataError("there is no image", where=str(inside[0]), remedy="put images into this folder")
    if not images.keys() & masks.keys() and (renamed := _without_endings(images, masks)) is not None:
        images, masks, ending = renamed
        notes.append(f"the masks are named NAME{ending}, and belong to the images NAME")
    _check_pairs(images, masks, inside[0], inside[1], what="image has no mask")
    _check_pairs(masks, images, inside[1], inside[0], what="mask has no image")
    pictures, of_masks = ([files[stem] for stem in sorted(images)] for files in (images, masks))
    return ImageFiles(inside[0], pictures), ImageFiles(inside[1], of_masks), tuple(notes)


def _without_endings(
    images: dict[str, str], masks: dict[str, str]
) -> tuple[dict[str, str], dict[str, str], str] | None:
    """Images and masks by the names without their endings, and the ending of the masks. None: no ending fits."""
    for ending in ("", *_ENDINGS):
        cut = _cut(masks, ending)
        for other in ("", *_IMAGE_ENDINGS):
            bare = _cut(images, other)
            if cut is not None and bare is not None and cut.keys() == bare.keys():
                return bare, cut, next(iter(masks))[len(next(iter(cut))) :]
    return None


def _cut(files: dict[str, str], ending: str) -> dict[str, str] | None:
    """Files by their names without an ending, in any case. None: not all names end so."""
    if not all(stem.lower().endswith(ending) for stem in files):
        return None
    return {stem[: len(stem) - len(ending)]: name for stem, name in files.items()}


def _by_stem(folder: Path) -> dict[str, str]:
    """Names of the images and arrays below a folder, by the names without suffix."""
    found: dict[str, str] = {}
    for name in files_below(folder):
        stem = name[: name.rindex(".")]
        if stem in found:
            what = f"{found[stem]} and {Path(name).name} have the same name except for the suffix"
            raise DataError(what, where=str(folder), remedy="remove one of the two, or rename it")
        found[stem] = name
    return found


def _check_pairs(files: dict[str, str], others: dict[str, str], folder: Path, other_folder: Path, what: str) -> None:
    missing = sorted(set(files) - set(others))
    if not missing:
        return
    more = f" ({len(missing)} of {len(files)} files of this folder have none)" if len(missing) > 1 else ""
    near = did_you_mean(missing[0], sorted(set(others) - set(files))[:1000])
    remedy = f"{near}Add {other_folder / missing[0]}.png (or a different suffix), or remove the file"
    raise DataError(f"this {what}{more}", where=str(folder / files[missing[0]]), remedy=remedy)
