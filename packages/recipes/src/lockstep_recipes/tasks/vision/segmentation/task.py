"""Semantic segmentation: each pixel has a class, and evaluation counts pixels at the original resolution."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError
from lockstep.core.task import Metrics
from lockstep_recipes.tasks.vision.faults import edges, empty_masks, masks
from lockstep_recipes.tasks.vision.image_models import Models
from lockstep_recipes.tasks.vision.image_task import ImageTaskMetadata
from lockstep_recipes.tasks.vision.images import geometry
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, contiguous, stack_images
from lockstep_recipes.tasks.vision.images.augment import train_image
from lockstep_recipes.tasks.vision.images.mask import MaskKind
from lockstep_recipes.tasks.vision.readers import masked_images
from lockstep_recipes.tasks.vision.readers.mask_files import size_of
from lockstep_recipes.tasks.vision.readers.mask_layouts import evaluation_source_with_masks
from lockstep_recipes.tasks.vision.readers.masked_images import MaskedImage
from lockstep_recipes.tasks.vision.segmentation import losses
from lockstep_recipes.tasks.vision.segmentation.losses import IGNORED
from lockstep_recipes.tasks.vision.segmentation.models import models_for
from lockstep_recipes.tasks.vision.segmentation.options import SegmentationOptions
from lockstep_recipes.tasks.vision.segmentation.presenter import SegmentationPresenter, SegmentationTask
from lockstep_recipes.tasks.vision.segmentation.windows import Tile, Window, Windows, tiles
from lockstep_recipes.tasks.vision.use_images import fitted_size

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = dict[str, Any]
Size = tuple[int, int]


@dataclass(frozen=True)
class SegmentationMetadata(ImageTaskMetadata):
    """What the task stores with the run. `counts` are pixels of the counted masks: see `MaskedImages.check`."""

    colors: list[list[int]]
    """Red, green and blue of each class, 0 to 255, for images."""
    masks: int
    """Training masks that were counted."""
    unseen: list[str] = field(default_factory=list)
    """Classes that occur in evaluation masks but in no training mask, so a model cannot learn them."""
    mask_kind: MaskKind = "palette"
    """The kind of the mask files of the training data: ids with a palette, ids as grey values, or colours."""
    ids: list[int] = field(default_factory=list)
    """The id of each class in these files; with `color`, their values are `colors`. Predicted masks use the same
    values."""
    palette: dict[str, list[int]] = field(default_factory=dict)
    """The colour of each class in the palette of the first training mask. Empty: it has no such colours.
    Masks with different palettes are read by these colours."""


@final
class Segmentation(SegmentationTask):
    """Each pixel has a class, or is ignored. Losses are sums over valid pixels, or over images; see `losses`.

    A training batch is a dict of `images`: uint8 (images, channels, size, size), and `masks`: int16 (images, size,
    size), with -1 for ignored pixels. Evaluation batches have images of different sizes: `images` and `masks` are lists
    of tensors, `masks` at the original resolution; `places` is a list of tuples: height and width to which the logits
    are resized, and top, left, height and width of the region that the mask covers; `tolerances` is a list of int, the
    distances in pixels at which boundaries match. Numbers in lists stay on the host.

    The output for an image is a dict of `classes`: (height, width) class numbers, at the original resolution.

    Args:
        train, eval: sources of images with masks: see `readers.masked_images.read_masked_images`. Without `eval`, the
            evaluation split of the folder `train` is used, if there is one.
        cache: options of the disk cache of decoded images (`data.cache`).
    """

    presenter = SegmentationPresenter
    finders = (
        *SegmentationTask.finders,
        masks.bad_masks,
        empty_masks.empty,
        masks.rarely_ignored,
        masks.inverted,
        masks.copied_masks,
        masks.other_palette,
        edges.turned_by_exif,
        edges.mirrored,
        edges.exchanged,
        edges.misfits,
    )
    kept = "segmentation.json"
    about_type = SegmentationMetadata

    def __init__(
        self, options: SegmentationOptions, train: str, eval: str | None = None, cache: CacheOptions | None = None
    ) -> None:
        super().__init__(options, train, eval or evaluation_source_with_masks(train), cache)
        self.calls_vary = options.eval_shape == "keep"
        names = list(options.losses)
        self.coefficients = {"loss" if len(names) == 1 else name: options.losses[name] for name in names}

    def to_keep(self) -> Any:
        return replace(self.about, unseen=self._check_evaluation())

    def _check_evaluation(self) -> list[str]:
        """Check the evaluation data for faults before the first step.

        Returns:
            the classes that occur in evaluation masks but in no training mask.
        """
        data, about = self._eval, self.about
        if data is None:
            return []
        found = (data.pictures if isinstance(data, Windows) else data).check()
        training = masked_images.ClassPixels(about.counts, ignored=0, masks=about.masks, of_masks=len(self._train))
        return masked_images.unseen_classes(training, found, about.classes)

    def learn(self) -> Any:
        data, options = self.read(self.train_source, "train", None), self.options
        names = list(data.classes)
        if len(names) < 2:
            remedy = "give two classes or more; the background is also a class"
            raise DataError(f"there is only the class {names[0]!r}", where=self.train_source, remedy=remedy)
        counted = data.check(len(data) if isinstance(options.class_weights, str) else masked_images.MOST_CHECKED)
        classes, pixels = self.models.classes(names), self.models.pixels()
        places = [names.index(name) if name in names else number for number, name in enumerate(classes)]
        assert data.masks is not None
        form = data.masks.form()
        return self.described(
            pixels,
            data,
            classes=classes,
            mask_kind=form.kind,
            ids=_ids(classes, form.ids),
            colors=[list(data.colors[place]) for place in places],
            counts=[counted.counts[place] for place in places],
            masks=counted.masks,
            palette={name: list(color) for name, color in (data.palette or {}).items()},
        )

    # ---- data

    def read(self, source: str, split: Literal["train", "eval"], classes: list[str] | None) -> Any:
        options = self.options if classes is None else self.reading_options
        kept = {} if classes is None else self.about.palette
        palette = {name: (red, green, blue) for name, (red, green, blue) in kept.items()}
        data = masked_images.read_masked_images(
            source, split, options, names=classes, palette=palette or None, cache=self.cache
        )
        if split == "train" or options.eval_window is None:
            return data
        sizes = [size_of(data.pictures, index) for index in range(len(data))]
        return Windows(data, sizes, side=options.eval_window, overlap=options.eval_overlap)

    @cached_property
    def models(self) -> Models:
        return models_for(self.options, self.folder)

    # ---- from an image to a batch

    def prepare(self, sample: MaskedImage | Window, epoch: int, training: bool) -> dict[str, Any]:
        """In training, the augmented image and its mask. In evaluation, the resized image, or the window, with the mask
        at the original resolution."""
        mask = sample.mask
        if training:
            if mask is None:
                raise DataError("the image has no mask", remedy="give a mask for each training image")
            picture = AnnotatedImage.from_pixels(sample.pixels, mask=torch.from_numpy(mask))
            side = self.options.size_at(epoch, self.about.size)
            picture = train_image(picture, side, self.options.augment, mask_fill=IGNORED)
            assert picture.mask is not None
            return {"images": picture.image, "masks": picture.mask}
        size = (sample.pixels.shape[0], sample.pixels.shape[1])
        labels = np.full(size, IGNORED, np.int16) if mask is None else mask
        place = (*size, 0, 0, *size)
        picture = AnnotatedImage.from_pixels(sample.pixels)
        if isinstance(sample, Window):
            (top, left, _, _), (core_top, core_left, height, width) = sample.tile
            top, left = core_top - top, core_left - left
            labels, place = labels[top : top + height, left : left + width], (*size, top, left, height, width)
        elif self.options.eval_window is None:
            wanted = self._evaluated_size(size)
            picture = geometry.resize(picture, wanted, interpolation=self.options.augment.interpolation)
        whole = sample.size if isinstance(sample, Window) else size
        return {
            "images": contiguous(picture).image,
            "masks": torch.from_numpy(np.ascontiguousarray(labels)),
            "places": place,
            "tolerances": self._tolerance(whole),
        }

    def _evaluated_size(self, size: Size) -> Size:
        """The size at which an image of (height, width) pixels is evaluated."""
        options = self.options
        if options.eval_shape == "square":
            side = options.size_for_evaluation(self.about.size)
            return side, side
        return fitted_size(size, options.eval_size)

    def _tolerance(self, size: Size) -> int:
        from lockstep_recipes.tasks.vision.segmentation.counts import tolerance_in_pixels

        share = self.options.boundary_tolerance
        return 0 if share is None else tolerance_in_pixels(size, share)

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        images, masks = ([sample[name] for sample in samples] for name in ("images", "masks"))
        if "places" not in samples[0]:
            return {"images": stack_images(images), "masks": torch.stack(masks)}
        return {
            "images": images,
            "masks": masks,
            "places": [sample["places"] for sample in samples],
            "tolerances": [sample["tolerances"] for sample in samples],
        }

    # ---- from a batch to a loss

    def weight(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """The number of valid pixels, or with class weights the sum of their weights; for `dice` and `lovasz`, the
        number of images with valid pixels."""
        masks = batch["masks"]
        stacks = [masks] if isinstance(masks, Tensor) else [mask.unsqueeze(0) for mask in masks]
        weights = self._weights.tensor

        def units(name: str) -> Tensor:
            if name in ("dice", "lovasz"):
                return torch.stack([losses.images_with_labels(stack) for stack in stacks]).sum()
            return torch.stack([losses.valid_pixels(stack, weights) for stack in stacks]).sum()

        found: Tensor | dict[str, Tensor] = self._by_head({name: units(name) for name in self.options.losses})
        return found

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        if isinstance(batch["masks"], Tensor):
            logits, masks = self._logits(model, batch["images"]), batch["masks"]
            logits = resized(logits, masks.shape[-2:])
            outputs: list[Any] = [self._output(of_picture) for of_picture in logits.detach()]
            return self._by_head(self._losses(logits, masks, training=model.training)), outputs
        sums: dict[str, Tensor] = {}
        outputs = [None] * len(batch["masks"])
        for place, logits in self._scores(model, batch):
            mask = batch["masks"][place]
            for name, value in self._losses(logits.unsqueeze(0), mask.unsqueeze(0), training=False).items():
                sums[name] = sums[name] + value if name in sums else value
            outputs[place] = self._output(logits)
        return self._by_head(sums), outputs

    def _by_head(self, values: dict[str, Tensor]) -> Any:
        """A single value belongs to the head `loss`."""
        return next(iter(values.values())) if len(values) == 1 else values

    def _losses(self, logits: Tensor, masks: Tensor, *, training: bool) -> dict[str, Tensor]:
        """The sum of each loss: logits (images, classes, height, width), masks (images, height, width)."""
        options, weights = self.options, self._weights.like(logits)
        found: dict[str, Tensor] = {}
        for name in options.losses:
            if name == "cross_entropy":
                smoothing = options.label_smoothing if training else 0.0
                found[name] = losses.cross_entropy(logits, masks, weights=weights, smoothing=smoothing)
            elif name == "focal":
                found[name] = losses.focal(logits, masks, gamma=options.focal_gamma, weights=weights)
            else:
                found[name] = losses.dice(logits, masks) if name == "dice" else losses.lovasz(logits, masks)
        return found

    # ---- outputs

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Tensor]]:
        """For each image `classes`: (height, width) class numbers at the original resolution.

        Images that are larger than `eval_window` are processed window by window."""
        if isinstance(batch["masks"], Tensor):
            logits = resized(self._logits(model, batch["images"]), batch["masks"].shape[-2:])
            return [self._output(of_picture) for of_picture in logits]
        outputs: list[Any] = [None] * len(batch["images"])
        for place, logits in self._scores(model, batch, tiled=outputs):
            outputs[place] = self._output(logits)
        return outputs

    def _scores(
        self, model: nn.Module, batch: Batch, *, tiled: list[Any] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The index of each image in the batch, and its logits (classes, height, width) at the original resolution.

        Images of the same size are processed together. They are not padded to a common size, because the result for an
        image would then depend on other images.

        Args:
            tiled: collects the outputs of images that are processed window by window. None: there are no such images.
        """
        images, places = batch["images"], batch["places"]
        groups: dict[Size, list[int]] = {}
        for number, image in enumerate(images):
            groups.setdefault((image.shape[1], image.shape[2]), []).append(number)
        for size, members in groups.items():
            if tiled is not None and max(size) > (self.options.eval_window or max(size)):
                for number in members:
                    tiled[number] = self._tiled(model, images[number])
                continue
            logits = self.logits_of_equal(model, stack_images([images[number] for number in members]))
            for number, of_picture in zip(members, logits, strict=True):
                height, width, top, left, rows, columns = places[number]
                whole = resized(of_picture.unsqueeze(0), (height, width))[0]
                yield number, whole[:, top : top + rows, left : left + columns]

    def logits_of_equal(self, model: nn.Module, images: Tensor) -> Tensor:
        """Logits; with `flip_at_evaluation` the logarithm of the mean of two probabilities."""
        logits = self._logits(model, images)
        if not self.options.flip_at_evaluation:
            return logits
        mirrored = self._logits(model, images.flip(-1)).flip(-1)
        both = torch.stack([logits.log_softmax(dim=1), mirrored.log_softmax(dim=1)])
        return both.logsumexp(dim=0) - float(np.log(2))

    def _tiled(self, model: nn.Module, image: Tensor) -> dict[str, Tensor]:
        """The output for an image, from the cores of its windows: image uint8 (channels, height, width)."""
        side, overlap = self.options.eval_window, self.options.eval_overlap
        assert side is not None
        size = (image.shape[1], image.shape[2])
        stitched: Tensor | None = None
        for tile in tiles(size, side=side, overlap=overlap):
            found = self._output(self._core(model, image, tile))["classes"]
            stitched = found.new_empty(size) if stitched is None else stitched
            top, left, height, width = tile.core
            stitched[top : top + height, left : left + width] = found
        assert stitched is not None
        return {"classes": stitched}

    def _core(self, model: nn.Module, image: Tensor, tile: Tile) -> Tensor:
        """The logits of the core of a window: (classes, height, width)."""
        (top, left, height, width), (core_top, core_left, rows, columns) = tile
        window = stack_images([image[:, top : top + height, left : left + width]])
        logits = resized(self.logits_of_equal(model, window), (height, width))[0]
        top, left = core_top - top, core_left - left
        return logits[:, top : top + rows, left : left + columns]

    def _output(self, logits: Tensor) -> dict[str, Tensor]:
        kind = torch.uint8 if len(self.classes) <= 256 else torch.int16
        return {"classes": logits.argmax(dim=0).to(kind)}

    def metrics(self) -> Metrics:
        """`miou`, `pixel_accuracy`, `iou/NAME`, `boundary_f1` and the matrix `confusion`: see `counts.PixelCounts`."""
        from lockstep_recipes.tasks.vision.segmentation.counts import PixelCounts

        metrics = PixelCounts(self.classes, boundary=self.options.boundary_tolerance is not None)
        return Metrics({"pixels": metrics}, _update)


def _update(metrics: MetricCollection, output: Sequence[Mapping[str, Tensor]], batch: Batch) -> None:
    """Update with a batch. Training batches do not have tolerances, because boundaries would wait for the device in
    every step."""
    predicted = [part["classes"] for part in output]
    if "tolerances" in batch:
        metrics.update(predicted, batch["masks"], batch["tolerances"])
    else:
        metrics.update([torch.stack(predicted)], [batch["masks"]])


def resized(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Logits (images, classes, h, w) interpolated bilinearly to (images, classes, height, width)."""
    if tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return functional.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def _ids(classes: Sequence[str], known: Mapping[str, int]) -> list[int]:
    """The id of each class. Classes of a pretrained model that are not in the data get the numbers after all known
    ids."""
    free = itertools.count(max(known.values()) + 1)
    return [known[name] if name in known else next(free) for name in classes]
