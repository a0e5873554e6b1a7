"""Images with masks (a class for each pixel) from folders, data sets and COCO files, as a map-style data set."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import SKIP, DataError
from lockstep_recipes.tasks.vision.images.cache import DecodedCache, reduced_size
from lockstep_recipes.tasks.vision.images.decode import WHITE, opened, orientation_of, turned
from lockstep_recipes.tasks.vision.readers import class_table, coco_masks, image_records, mask_files
from lockstep_recipes.tasks.vision.readers.box_layouts import find_layout
from lockstep_recipes.tasks.vision.readers.boxed_images import picture_files
from lockstep_recipes.tasks.vision.readers.class_table import ClassesOption, ClassTable, Color
from lockstep_recipes.tasks.vision.readers.coco_file import read_coco
from lockstep_recipes.tasks.vision.readers.decoded_images import ImageDataset, open_cache
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages, ImageFiles, left_out_below
from lockstep_recipes.tasks.vision.readers.image_records import Split
from lockstep_recipes.tasks.vision.readers.image_table import IMAGE, data_set_images, image_column
from lockstep_recipes.tasks.vision.readers.mask_files import EncodedMasks, Masks
from lockstep_recipes.tasks.vision.readers.mask_layouts import class_file, foreign_files, inner_part, is_coco
from lockstep_recipes.tasks.vision.readers.mask_lookup import IGNORED, MaskLookup
from lockstep_recipes.tasks.vision.readers.mask_pairs import ARRAYS, read_mask_folder

if TYPE_CHECKING:
    from lockstep_recipes.tasks.vision.segmentation.options import SegmentationOptions

MASK_COLUMNS = ("mask", "masks", "annotation", "annotations", "label", "labels", "segmentation", "segmentation_mask")
"""Usual names of columns with masks."""
MOST_CHECKED = 500
"""Masks that `MaskedImages.check` reads."""
_KEPT_CLASSES = 255  # the cache keeps masks of up to this many classes, as uint8
_KEPT_IGNORED = 255


class MaskedImage(NamedTuple):
    """A raw sample."""

    pixels: npt.NDArray[np.uint8]
    """(height, width, channels) uint8, upright."""
    mask: npt.NDArray[np.int16] | None
    """The class number of each pixel, or -1 for an ignored pixel: (height, width) int16. None: the image has no
    mask."""
    name: str
    """The name of the image in its source."""


@dataclass(frozen=True)
class ClassPixels:
    """Pixel counts by class of some masks."""

    counts: list[int]
    """Pixels of each class, by class number."""
    ignored: int
    """Pixels that do not belong to a class."""
    masks: int
    """Masks that were counted."""
    of_masks: int
    """Masks of the data set."""


class MaskedImages(ImageDataset):
    """Decoded images with masks: samples are `MaskedImage`.

    Args:
        images: the encoded images.
        masks: a mask for each. None: the images have none.
        classes: the names of the classes, by number.
        colors: a colour to draw each class. None: the colours of the first mask's palette, or default ones.
        channels, levels, cache, notes: as for `ImageDataset`. Images and masks share the limit of the cache.
    """

    def __init__(
        self,
        images: EncodedImages,
        masks: Masks | None,
        classes: Sequence[str],
        *,
        colors: Sequence[Color],
        channels: int = 3,
        levels: int = WHITE,
        cache: CacheOptions | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        kept = masks if masks is not None and len(classes) <= _KEPT_CLASSES else None
        limit = None if cache is None else cache.limit_bytes
        each = None if limit is None else limit // (channels + (kept is not None))
        own = cache if cache is None or each is None else replace(cache, limit_bytes=each * channels)
        super().__init__(images, channels=channels, levels=levels, cache=own, notes=notes)
        self.masks, self.classes, self.colors = masks, list(classes), list(colors)
        lookup = masks.lookup if isinstance(masks, EncodedMasks) else None
        self.palette = None if lookup is None else lookup.named_palette
        """The colour of each class in the palette of the first mask. None: it has no palette, or not such colours."""
        self.shorter_side = None if cache is None else cache.shorter_side
        self.mask_cache: DecodedCache | None = None
        """The cache of masks. None: there is no cache, or there are more than 255 classes."""
        if kept is not None and cache is not None:
            reduced_masks = _ReducedMasks(kept, self.shorter_side)  # the cache would interpolate class numbers
            self.mask_cache = open_cache(reduced_masks, channels=1, options=CacheOptions(limit_bytes=each))

    def __getitem__(self, index: int) -> MaskedImage:
        """A sample.

        Raises:
            DataError: a file cannot be read, or is not a complete image; the mask and the image differ in size, or the
                mask contains a value that is not a class. The error names file and value.
        """
        pixels = self.pixels(index)
        name = self.pictures.name(index)
        if self.masks is None:
            return MaskedImage(pixels, None, name)
        mask = self._mask(self.masks, index)
        if mask.shape != pixels.shape[:2] and mask.shape == pixels.shape[1::-1]:
            mask = turned(mask, self._sideways(index))
        if mask.shape != pixels.shape[:2]:
            raise self._wrong_size(index, mask.shape, pixels.shape[:2])
        return MaskedImage(pixels, mask, name)

    def _sideways(self, index: int) -> int:
        """The EXIF orientation that turns an image on its side, for a mask that was drawn before. 1: there is none."""
        with opened(self.pictures.read(index), self.where(index)) as image:
            orientation = orientation_of(image)
        return orientation if orientation >= 5 and isinstance(self.masks, EncodedMasks) else 1

    def _mask(self, masks: Masks, index: int) -> npt.NDArray[np.int16]:
        """The mask of an image, reduced like the cache reduces images."""
        if self.mask_cache is None:
            return _reduced(masks.read(index), self.shorter_side)

        def read() -> npt.NDArray[np.uint8]:
            mask = _reduced(masks.read(index), self.shorter_side)
            return np.where(mask == IGNORED, _KEPT_IGNORED, mask).astype(np.uint8)[..., None]

        kept = self.mask_cache.pixels(index, read)[..., 0]
        mask = kept.astype(np.int16)
        mask[kept == _KEPT_IGNORED] = IGNORED
        return mask

    def check(self, most: int = MOST_CHECKED) -> ClassPixels:
        """Check for faults before training, and count the pixels of each class.

        The size of each mask is compared with that of its image, from the file headers: a few thousand pairs per
        second. For a data set of `datasets`, which has no files with headers, `most` rows are compared. Then `most`
        masks are read, a random but fixed choice, or all if there are fewer. Faults in all other masks are found when
        they are read.

        Raises:
            DataError: a mask and its image differ in size, a mask contains a value that is not a class, or a file
                cannot be read. `data.on_error` does not apply here, so that faults of a whole data set are found.
        """
        with _without_skip():
            return self._checked(most)

    def _checked(self, most: int) -> ClassPixels:
        if self.masks is None:
            return ClassPixels([0] * len(self.classes), ignored=0, masks=0, of_masks=0)
        self.masks.check()
        chosen = np.sort(np.random.default_rng(0).permutation(len(self))[:most])
        self._check_sizes(range(len(self)) if isinstance(self.pictures, ImageFiles) else chosen.tolist())
        counts = np.zeros(len(self.classes) + 1, dtype=np.int64)
        for index in chosen.tolist():
            counts += np.bincount(self.masks.read(index).reshape(-1) + 1, minlength=len(counts))
        return ClassPixels(counts[1:].tolist(), ignored=int(counts[0]), masks=len(chosen), of_masks=len(self))

    def _check_sizes(self, indices: Sequence[int]) -> None:
        assert self.masks is not None
        sizes = ((index, mask_files.size_of(self.pictures, index), self.masks.size(index)) for index in indices)
        wrong = [index for index, picture, mask in sizes if picture != mask]
        for index in wrong:
            picture = mask_files.size_of(self.pictures, index, whole=True)
            mask = self.masks.read(index).shape
            if mask != picture and (mask != picture[::-1] or self._sideways(index) == 1):
                raise self._wrong_size(index, mask, picture, others=len(wrong) - 1)

    def _wrong_size(self, index: int, mask: tuple[int, ...], image: tuple[int, ...], *, others: int = 0) -> DataError:
        assert self.masks is not None
        more = f"; {others} other masks also differ" if others else ""
        what = f"the mask has {mask[0]}x{mask[1]} pixels (height x width), but its image {image[0]}x{image[1]}"
        remedy = "save the mask with the size of its image"
        if mask == image[::-1]:
            remedy += "; the image may have an orientation in its EXIF data that the mask lacks"
        return DataError(what + more, where=f"{self.masks.where(index)}, mask of {self.where(index)}", remedy=remedy)


@contextlib.contextmanager
def _without_skip() -> Iterator[None]:
    """Errors in the block do not suggest `data.on_error=skip`, which only applies to later reads."""
    try:
        yield
    except DataError as error:
        if error.remedy is None or SKIP not in error.remedy:
            raise
        remedy = error.remedy.replace(SKIP, "remove both the image and its mask")
        raise DataError(error.what, where=error.where, remedy=remedy) from error


class _ReducedMasks:
    """The name of a cache of masks: it changes with the masks, and with the size to which they are reduced."""

    def __init__(self, masks: Masks, shorter_side: int | None) -> None:
        self.masks, self.shorter_side = masks, shorter_side

    def __len__(self) -> int:
        return len(self.masks)

    def digest(self) -> str:
        return f"{self.masks.digest()}|{self.shorter_side}"


def _reduced(mask: npt.NDArray[np.int16], shorter_side: int | None) -> npt.NDArray[np.int16]:
    """A mask at the size of its image in the cache: the values at the centres of the new pixels."""
    height, width = mask.shape
    size = reduced_size(height, width, shorter_side)
    if size == (height, width):
        return mask
    lines, columns = (
        (2 * np.arange(new) + 1) * old // (2 * new) for new, old in zip(size, (height, width), strict=True)
    )
    reduced: npt.NDArray[np.int16] = mask[lines[:, None], columns]
    return reduced


# ---- reading a source


def read_masked_images(
    source: str,
    split: Split,
    options: SegmentationOptions,
    *,
    names: Sequence[str] | None = None,
    palette: Mapping[str, Color] | None = None,
    cache: CacheOptions | None = None,
) -> MaskedImages:
    """The images of a source, with masks.

    | source | samples |
    |---|---|
    | a folder with `images/` and `masks/` | an image and the mask of the same name, at any depth |
    | a folder with `train/`, and `val/`, `validation/`, `valid/`, `eval/` or `test/` | such folders in one of these |
    | a folder with `images/train/` and `masks/train/`, `images/val/` and `masks/val/` | one of these pairs |
    | `FOLDER[:SPLIT]` that `datasets` saved, `NAME[:SPLIT]` on the hub | a column of images, a column of masks |
    | a COCO file (.json), or a folder with `annotations/*.json` and no masks | masks are drawn from polygons and RLE |

    Args:
        split: the split to read if the source has several and does not name one.
        options: its `classes`, `ignore`, `images` and `eval_images`, `columns`, `subset`, `channels`, `levels`. Without
            `classes`: a file of the source with one of the names `CLASS_FILES`, in the folder of the split or its
            parent; for COCO files, `background` (pixels without annotation) and the categories.
        names: the class names of the training data, for evaluation data: class numbers are indices into this list.
            None: the classes of the source.
        palette: the colour of each class in the palettes of the training masks. None: those of the first mask.
        cache: options of the disk cache of decoded images and masks. Evaluation data is never reduced to
            `shorter_side`, because it is evaluated at its original size.

    Raises:
        DataError: there is no such source; an image or a mask is missing (file); the classes are unknown, or are not
            among `names`. Sizes and values of masks are not checked here, but by `MaskedImages.check`.
    """
    path, key = Path(source), f"data.{split}"
    masks: Masks
    if is_coco(path):
        layout = find_layout(source, key=key, split=split, images=options.images_of(split))
        found = read_coco(layout.annotations, key=key, boxes=False, segmentations=True)
        table = coco_masks.class_table(found, options.classes, options.ignore, names=names)
        pictures: EncodedImages = picture_files(found, layout.images, key)
        masks, notes = coco_masks.CocoMasks.of_classes(found, table, names=names, images=pictures), found.notes
    else:
        pictures, files, folder, pairs = _files(source, split, options)
        classes, foreign = options.classes, list[str]()
        if classes is None and folder is not None:
            classes, foreign = class_file(folder, path), foreign_files(folder, path)
        foreign = [
            f"{file} describes the folders of a data set but does not name classes: it is not used" for file in foreign
        ]
        notes = left_out_below(one.root for one in (pictures,) if isinstance(one, ImageFiles))
        notes += left_out_below((one.root for one in (files,) if isinstance(one, ImageFiles)), labels=ARRAYS)
        notes = (*notes, *pairs, *(f"note: {text}" for text in foreign))
        if classes is None and (second := mask_files.second_of_two_ids(files)) is not None:
            classes = {"background": 0, "object": second}
            what = f"no classes are named, and the first masks of data.{split} contain two ids"
            notes = (*notes, f"{what}: using task.classes='{{background: 0, object: {second}}}'")
        table = _table(classes, options.ignore, files=files, key=key, foreign=foreign)
        lookup = MaskLookup(table, names, palette or mask_files.first_palette(files, table))
        masks, notes = EncodedMasks(files, lookup), (*notes, *mask_files.saved_as_rgb(files, lookup))
    if cache is not None and split == "eval":
        cache = replace(cache, shorter_side=None)
    own = table.names if names is None else names
    kept: dict[str, Any] = {"channels": options.channels, "levels": options.levels or WHITE}
    kept |= {"cache": cache, "notes": notes}
    return MaskedImages(pictures, masks, own, colors=_colors(table, masks, names), **kept)


def unseen_classes(training: ClassPixels, evaluation: ClassPixels, classes: Sequence[str]) -> list[str]:
    """Classes that occur in evaluation masks but in none of the training masks, so a model cannot learn them. Empty if
    not all training masks were counted.

    Args:
        classes: the names of the classes.
    """
    if training.masks < training.of_masks:
        return []
    counts = zip(classes, training.counts, evaluation.counts, strict=True)
    return [name for name, in_training, in_evaluation in counts if in_evaluation and not in_training]


def masked_inputs(
    arguments: Sequence[str], *, classes: Sequence[str], colors: Sequence[Color], channels: int = 3, levels: int = WHITE
) -> MaskedImages:
    """Images to predict, without masks: files, folders, patterns and tar shards.

    Args:
        arguments: see `unlabelled_images`.
        classes, colors, levels: those of the training data.

    Raises:
        DataError: shards and files are mixed.
        UsageError: an argument does not name anything.
    """
    records = image_records.unlabelled_images(arguments)
    kept: dict[str, Any] = {"channels": channels, "levels": levels, "notes": records.notes}
    return MaskedImages(records.pictures, None, classes, colors=colors, **kept)


def _table(
    classes: ClassesOption, ignore: Sequence[Any], *, files: EncodedImages, key: str, foreign: Sequence[str]
) -> ClassTable:
    """The table from `classes`, without ignored entries."""
    if classes is None:
        ids = mask_files.ids_in(files)
        seen = f"the first masks contain the ids {class_table.listed([str(value) for value in ids], 20)}"
        files_of_classes = f"a file, or {class_table.CLASS_FILES[0]} next to the masks"
        remedy = f"name the classes: task.classes='[background, object]', {files_of_classes}"
        seen = seen if ids else "the masks are colour images"
        rare = mask_files.rare_id(files)
        what = "; ".join(("the class names are unknown", seen, *([rare] if ids and rare else []), *foreign))
        raise DataError(what, where=f"{key}, {files.where(0)}", remedy=remedy)
    table = class_table.read_class_table(classes)
    return table.with_ignored(ignore, where="task.ignore") if ignore else table


def _files(
    source: str, split: Split, options: SegmentationOptions
) -> tuple[EncodedImages, EncodedImages, Path | None, tuple[str, ...]]:
    """The images of a folder or a data set, the files of their masks, their folder, and notes."""
    path, columns = Path(source), options.columns
    if path.is_dir() and not image_records.is_saved_data_set(path):
        folder = image_records.part_of_folder(path, split) or path
        images, masks, notes = read_mask_folder(folder, inner_part(folder, split))
        return images, masks, folder, notes
    remedy = "Give a folder with images/ and masks/, or a COCO file (.json)"
    data, name = image_records.open_data_set(source, split, options.subset, what="images with masks", remedy=remedy)
    mask = image_column(data, columns.mask, role="mask", usual_names=MASK_COLUMNS, name=name)
    image = image_column(data, columns.image, role="image", usual_names=IMAGE, name=name, other=mask)
    if not len(data):
        raise DataError(f"data.{split} contains no images", where=source, remedy="give a source with images")
    return data_set_images(data, image, name=name), data_set_images(data, mask, name=name), None, ()


def _colors(table: ClassTable, masks: Masks, names: Sequence[str] | None) -> list[Color]:
    """A colour for each class, for drawings."""
    try:
        palette = masks.palette()
    except DataError:  # the fault is reported when the mask is needed
        palette = None
    own = dict(zip(table.names, table.colors(palette), strict=True))
    spare = (color for color in map(class_table.usual_color, itertools.count()) if color not in own.values())
    return [own[name] if name in own else next(spare) for name in (own if names is None else names)]
