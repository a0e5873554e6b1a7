"""Masks: values outside the classes, masks of one class, inverted masks, copies, palettes that differ."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.faults.edges import drawn
from lockstep_recipes.tasks.vision.faults.view import ImageSplit, ImageView
from lockstep_recipes.tasks.vision.images.mask import decode_mask
from lockstep_recipes.tasks.vision.readers.mask_files import EncodedMasks

_RARE = 0.1
_MOST = 0.9
_SOME = 0.2
_INTRICATE = 60
"""Masks with a shorter outline may be equal by chance."""


@dataclass(frozen=True)
class MaskFacts:
    """What one mask shows."""

    index: int
    file: str
    counts: Array
    """Pixels of each class: (classes,)."""
    ignored: int
    at_border: Array
    """The same, of the pixels at the border of the image."""
    digest: bytes
    outline: int
    """Pixels whose neighbour below has a different class."""
    contrast: float
    """The mean grey of the pixels of classes other than the first, minus that of the first: 0 to 255."""


def checked(split: ImageSplit) -> tuple[list[MaskFacts], list[DataFinding]]:
    """The facts of the masks of the opened images, and what cannot be read. Computed once for a split."""
    kept: tuple[list[MaskFacts], list[DataFinding]] | None = split.__dict__.get("mask_facts")
    if kept is not None:
        return kept
    found: list[MaskFacts] = []
    faults: list[DataFinding] = []
    for one in split.facts:
        where = split.masks.where(one.index)
        try:
            mask = split.masks.read(one.index)
        except DataError as error:
            what = error.what if error.where in (None, where) else str(error)
            remedy = error.remedy or "correct the mask"
            faults.append(DataFinding("error", "bad-mask", where, what, remedy, partial(_raw, split, one.index)))
            continue
        if one.error is None and (problem := _other_size(split, one.size, one.orientation, mask.shape)):
            remedy = "save the mask with the size of its image"
            faults.append(DataFinding("error", "mask-size", where, problem, remedy, partial(split.pixels, one.index)))
            continue
        counts = np.bincount(mask.reshape(-1) + 1, minlength=len(split.classes) + 1)
        border = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
        at_border = np.bincount(border + 1, minlength=len(split.classes) + 1)[1:]
        contrast = 0.0
        if one.error is None and one.thumbnail is not None:
            contrast = _contrast(mask, one.thumbnail)
        digest = hashlib.blake2b(np.ascontiguousarray(mask).tobytes(), digest_size=16).digest()
        outline = int((mask[1:] != mask[:-1]).sum())
        found.append(MaskFacts(one.index, where, counts[1:], int(counts[0]), at_border, digest, outline, contrast))
    split.__dict__["mask_facts"] = found, faults
    return found, faults


def _contrast(mask: Array, thumbnail: Array) -> float:
    """The difference of the mean greys, from a thumbnail and the mask at its centres."""
    side = len(thumbnail)
    rows, columns = ((2 * np.arange(side) + 1) * length // (2 * side) for length in mask.shape)
    small = mask[rows[:, None], columns]
    first, others = thumbnail[small == 0], thumbnail[small > 0]
    return float(others.mean() - first.mean()) if len(first) and len(others) else 0.0


def _other_size(split: ImageSplit, stored: tuple[int, int], orientation: int, mask: tuple[int, ...]) -> str | None:
    upright = stored[::-1] if orientation >= 5 else stored
    if mask == upright or (mask == stored and isinstance(split.masks, EncodedMasks)):  # the recipe turns it
        return None
    return f"the mask has {mask[0]}x{mask[1]} pixels (height x width), but its image {upright[0]}x{upright[1]}"


def _raw(split: ImageSplit, index: int) -> Array:
    """The values of a mask file, spread over all greys."""
    values = decode_mask(split.masks.files.read(index)).values.astype(np.float32)
    grey = (255 * (values - values.min()) / max(1.0, float(values.max() - values.min()))).astype(np.uint8)
    return grey if grey.ndim == 3 else np.repeat(grey[..., None], 3, axis=2)


def bad_masks(data: ImageView) -> Iterator[DataFinding]:
    """Masks that cannot be read, have unknown values, or a different size than their image."""
    for split in data.splits:
        if split.masks is not None:
            yield from checked(split)[1]


def rarely_ignored(data: ImageView) -> Iterator[DataFinding]:
    """Ignored pixels in a few masks only, where they are many compared with the objects."""
    for split in (one for one in data.splits if one.masks is not None):
        found = checked(split)[0]
        odd = [one for one in found if one.ignored and one.counts.any()]  # others have nothing labelled
        if len(found) < 10 or len(odd) > _SOME * len(found):
            continue
        for one in odd:
            share = one.ignored / (one.ignored + int(one.counts[1:].sum()))
            if share > _SOME:
                what = f"{share:.0%} of the pixels that are not {split.classes[0]!r} are ignored; "
                what += f"{len(found) - len(odd)} of {len(found)} masks ignore none"
                remedy = "is the ignored value a class here, such as 255 for 1? Correct the mask, or the class file"
                image = partial(drawn, split, one.index)
                yield DataFinding("warning", "rarely-ignored", one.file, what, remedy, image)


def inverted(data: ImageView) -> Iterator[DataFinding]:
    """Masks of two classes whose values are exchanged: the object is at the border, and background in the middle."""
    for split in (one for one in data.splits if one.masks is not None):
        found = [one for one in checked(split)[0] if (one.counts > 0).sum() == 2 and one.counts[:2].all()]
        if len(found) < 5:
            continue
        at_border = np.array([one.at_border[1] / max(1, one.at_border[:2].sum()) for one in found])
        shares = np.array([one.counts[1] / one.counts[:2].sum() for one in found])
        signs = np.sign([one.contrast for one in found])
        usual_border, usual_share, usual_sign = (float(np.median(values)) for values in (at_border, shares, signs))
        if not min(usual_border, 1 - usual_border) < 0.25 or not usual_sign:
            continue
        is_object = at_border > 0.5
        odd = (is_object != (usual_border > 0.5)) & (np.abs(shares - (1 - usual_share)) < np.abs(shares - usual_share))
        odd &= signs == -usual_sign
        if odd.sum() > _RARE * 3 * len(found):
            continue
        for place in np.flatnonzero(odd).tolist():
            one = found[place]
            what = f"the classes seem to be exchanged: {shares[place]:.0%} of the pixels are {split.classes[1]!r}, "
            what += f"usually {usual_share:.0%}, and they differ from the others in the opposite direction"
            remedy = f"exchange {split.classes[0]!r} and {split.classes[1]!r} in this mask"
            yield DataFinding("error", "inverted-mask", one.file, what, remedy, partial(drawn, split, one.index))


def copied_masks(data: ImageView) -> Iterator[DataFinding]:
    """Equal masks of different images."""
    for split in (one for one in data.splits if one.masks is not None):
        images = {one.index: one.digest for one in split.facts}
        by_content: dict[bytes, list[MaskFacts]] = defaultdict(list)
        for one in checked(split)[0]:
            if one.outline >= _INTRICATE:
                by_content[one.digest].append(one)
        groups = [group for group in by_content.values() if len({images[one.index] for one in group}) > 1]
        if sum(map(len, groups)) > _MOST * len(images):
            continue  # such as rectangles that all images share
        for first, *others in groups:
            for one in others:
                what, remedy = f"the mask is equal to {first.file}, of a different image", "label the image itself"
                yield DataFinding("warning", "copied-mask", one.file, what, remedy, partial(drawn, split, one.index))


def other_palette(data: ImageView) -> Iterator[DataFinding]:
    """Masks whose palettes number colours differently than the first one. The recipe reads them by colour."""
    for split in (one for one in data.splits if isinstance(one.masks, EncodedMasks) and one.masks.lookup.palette):
        for one in checked(split)[0]:
            mask = decode_mask(split.masks.files.read(one.index), where=one.file)
            if split.masks.lookup.renumbered(mask, one.file) is not mask.values:
                what = "its palette numbers the colours differently than the first mask: it is read by colour"
                remedy = "save all masks with one palette, so that other programs read them correctly, too"
                yield DataFinding("warning", "other-palette", one.file, what, remedy, partial(drawn, split, one.index))
