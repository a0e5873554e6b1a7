"""Object detection: boxes with classes in images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError
from lockstep.core.task import Metrics
from lockstep_recipes.tasks.vision.detection.model_choice import models_for
from lockstep_recipes.tasks.vision.detection.models import DetectionModels, Detections, Targets, image_of_each
from lockstep_recipes.tasks.vision.detection.options import MOST_COUNTED, DetectionOptions
from lockstep_recipes.tasks.vision.detection.overlap import remaining
from lockstep_recipes.tasks.vision.detection.presenter import DetectionPresenter
from lockstep_recipes.tasks.vision.detection.program import DetectionTask
from lockstep_recipes.tasks.vision.detection.views import View, in_image, views
from lockstep_recipes.tasks.vision.faults import boxes, edges
from lockstep_recipes.tasks.vision.image_task import ImageTaskMetadata
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, stack_images
from lockstep_recipes.tasks.vision.images.augment import train_image
from lockstep_recipes.tasks.vision.images.mosaic import draw_others, mosaic
from lockstep_recipes.tasks.vision.readers.boxed_images import (
    BoxedImage,
    BoxedImages,
    evaluation_part,
    read_boxed_images,
)
from lockstep_recipes.tasks.vision.readers.class_table import read_class_table

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = dict[str, Tensor]

_NO_ID = -1  # for images to predict that are not in a file; never looked up
_VIEWS = 8  # tiles to process at a time, if a batch has more tiles than this and more tiles than images


@dataclass(frozen=True)
class DetectionMetadata(ImageTaskMetadata):
    """What the task stores with the run. `counts` are numbers of boxes."""

    category_ids: list[int]
    """The number of each class in the annotation file of the training data. Prediction files use these numbers."""


@final
class Detection(DetectionTask):
    """Each image has any number of boxes with classes. The metrics are COCO's, by pycocotools.

    A batch is a dict. An image has one view, or several if it is split into tiles for an evaluation:

    | key | | |
    |---|---|---|
    | `images` | uint8 (views, channels, size, size) | the images, each fitted into a square |
    | `boxes` | float32 (boxes, 4) | the boxes of all views, in pixels of the views |
    | `labels`, `crowd` | int64 (boxes), bool (boxes) | their class numbers, and whether they mark a group of objects |
    | `objects`, `regions` | int64 | indices in `boxes` of single objects, and of crowds |
    | `counts` | int64 (views) | number of boxes of each view |
    | `shapes` | int64 (views, 2) | height and width of each view without padding |
    | `scale`, `offset` | float32 (views, 2) | the mapping to the original image, as in `views.View` |
    | `views` | int64 (images) | number of views of each image |
    | `sizes` | int64 (images, 2) | height and width of the original images |
    | `ids` | int64 (images) | their ids in the annotation file |

    An output is a dict of `boxes`: float32 (images, `most_boxes`, 4), left, top, right and bottom in pixels of the
    original image; `scores`: float32 (images, `most_boxes`), descending; and `labels`: int64 (images, `most_boxes`), -1
    for entries without a box.

    Args:
        train, eval: sources of images with boxes: see `tasks.vision.readers.boxed_images.read_boxed_images`.
        cache: options of the disk cache of decoded images (`data.cache`).
    """

    presenter = DetectionPresenter
    finders = (
        *DetectionTask.finders,
        boxes.bad_boxes,
        boxes.odd_sizes,
        boxes.doubled,
        boxes.other_size,
        boxes.in_one_corner,
        boxes.rare_box_class,
        edges.turned_by_exif,
        edges.mirrored,
        edges.exchanged,
        edges.misfits,
    )
    kept = "detection.json"
    about_type = DetectionMetadata

    def __init__(
        self, options: DetectionOptions, train: str, eval: str | None = None, cache: CacheOptions | None = None
    ) -> None:
        super().__init__(options, train, eval or evaluation_part(train), cache)
        self.calls_vary = options.tile is not None

    def learn(self) -> Any:
        data = self.read(self.train_source, "train", None)
        classes, pixels = self.models.classes(data.classes), self.models.pixels()
        number = {name: place for place, name in enumerate(data.classes)}
        counts = data.class_counts()
        return self.described(
            pixels,
            data,
            classes=classes,
            category_ids=[int(data.category_ids[number[name]]) for name in classes],
            counts=[counts[name] for name in classes],
        )

    @cached_property
    def models(self) -> DetectionModels:
        """The object that makes the model, and computes its losses and boxes."""
        return models_for(self.options, self.folder)

    # ---- data

    def read(self, source: str, split: Literal["train", "eval"], classes: list[str] | None) -> BoxedImages:
        options = self.options if classes is None else self.reading_options
        if classes is None and options.classes is not None:
            classes = read_class_table(options.classes).names
        return read_boxed_images(source, split, options, classes=classes, cache=self.cache)

    def unchecked(self, split: str) -> Any:
        source: Any = self.train_source if split == "training" else self.eval_source
        with contextlib.suppress(DataError):
            part: Literal["train", "eval"] = "train" if split == "training" else "eval"
            return None if source is None else read_boxed_images(source, part, self.options, checked=False)
        return None

    # ---- the model

    def trial(self, model: nn.Module, images: Tensor) -> Any:
        shapes = torch.full((len(images), 2), images.shape[-1], device=images.device)
        return self.models.forward(model, images, shapes, None)

    @property
    def coefficients(self) -> Mapping[str, float]:  # type: ignore[override]
        """Factor of each head's mean in the total loss."""
        found: Mapping[str, float] = self.models.coefficients()
        return found

    # ---- from an image to a batch

    def prepare(self, sample: BoxedImage, epoch: int, training: bool) -> dict[str, Any]:
        """The views of an image. In training, a single augmented view."""
        options, default = self.options, self.about.size
        picture = _picture(sample)
        labels, crowd = torch.as_tensor(sample.labels), torch.as_tensor(sample.crowd)
        if training:
            size = options.size_at(epoch, default)
            others = draw_others(len(self._train), options.mosaic) if options.mosaic else []
            if others:
                samples = [sample, *(self._other(index) for index in others)]
                changed = mosaic([_picture(one) for one in samples], size, options.augment)
                labels = torch.cat([torch.as_tensor(one.labels) for one in samples])
                crowd = torch.cat([torch.as_tensor(one.crowd) for one in samples])
            else:
                changed = train_image(picture, size, options.augment)
            seen = [View(changed, changed.size, (1.0, 1.0), (0, 0))]
        else:
            seen = views(picture, options.size_for_evaluation(default), options)
        indices = [view.picture.box_indices for view in seen]
        # The cache may have reduced the image.
        reduced = sample.size[1] / picture.size[1], sample.size[0] / picture.size[0]
        return {
            "views": seen,
            "scale": [(view.scale[0] / reduced[0], view.scale[1] / reduced[1]) for view in seen],
            "offset": [(view.offset[0] * reduced[0], view.offset[1] * reduced[1]) for view in seen],
            "labels": [labels[index] for index in indices],
            "crowd": [crowd[index] for index in indices],
            "size": sample.size,
            "id": _NO_ID if sample.image_id is None else int(sample.image_id),
        }

    def _other(self, index: int) -> BoxedImage:
        """A training sample for a mosaic."""
        with self.partner(index, "a mosaic"):
            found: BoxedImage = self._train[index]
        return found

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        seen: list[View] = [view for sample in samples for view in sample["views"]]
        boxes = [view.picture.boxes for view in seen]
        crowd = torch.cat([part for sample in samples for part in sample["crowd"]]).bool()
        return {
            "images": stack_images([view.picture.image for view in seen]),
            "boxes": torch.cat([part for part in boxes if part is not None]),
            "labels": torch.cat([part for sample in samples for part in sample["labels"]]).long(),
            "crowd": crowd,
            "objects": (~crowd).nonzero().squeeze(1),
            "regions": crowd.nonzero().squeeze(1),
            "counts": torch.tensor([len(part) for part in boxes if part is not None]),
            "shapes": torch.tensor([view.shape for view in seen]),
            "scale": torch.tensor([pair for sample in samples for pair in sample["scale"]], dtype=torch.float32),
            "offset": torch.tensor([pair for sample in samples for pair in sample["offset"]], dtype=torch.float32),
            "views": torch.tensor([len(sample["views"]) for sample in samples]),
            "sizes": torch.tensor([sample["size"] for sample in samples]),
            "ids": torch.tensor([sample["id"] for sample in samples]),
        }

    # ---- from a batch to a loss

    @staticmethod
    def targets(batch: Batch) -> Targets:
        """The true boxes of the views of a batch. Crowds are ignored regions."""
        crowd, counts = batch["crowd"], batch["counts"]
        view = image_of_each(counts, len(crowd))
        ignored_counts = torch.zeros_like(counts).index_add_(0, view, crowd.to(counts.dtype))
        objects, regions = batch["objects"], batch["regions"]
        return Targets(
            boxes=batch["boxes"][objects],
            labels=batch["labels"][objects],
            counts=counts - ignored_counts,
            ignored=batch["boxes"][regions],
            ignored_counts=ignored_counts,
            shapes=batch["shapes"],
        )

    def weight(self, batch: Batch) -> dict[str, Tensor]:
        units: dict[str, Tensor] = self.models.weights(self.targets(batch))
        return units

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        targets = self.targets(batch)
        if model.training:  # mAP needs all detections at once, so there is none for training
            outputs = self._forward(model, batch["images"], targets, training=True)
            return self.models.losses(model, outputs, targets)
        losses: dict[str, Tensor] = {}
        found = []
        for outputs, part in self._parts(model, batch, targets):
            for head, value in self.models.losses(model, outputs, part).items():
                losses[head] = losses[head] + value if head in losses else value
            found.append(self._detections(model, outputs, batch))
        return losses, self._together(found, batch)

    def _forward(self, model: nn.Module, images: Tensor, targets: Targets, *, training: bool) -> Any:
        return self.models.forward(model, self.normalised(model, images), targets.shapes, targets if training else None)

    def _parts(self, model: nn.Module, batch: Batch, targets: Targets) -> Iterator[tuple[Any, Targets]]:
        """The outputs of the views of a batch, and their targets. Tiles are processed a few at a time, to save
        memory."""
        images, step = batch["images"], max(len(batch["ids"]), _VIEWS)
        for begin in range(0, len(images), step):
            part = targets.part(begin, begin + step)
            yield self._forward(model, images[begin : begin + step], part, training=False), part

    # ---- outputs

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The boxes of each image, in pixels of the original image."""
        parts = self._parts(model, batch, self.targets(batch))
        return self._together([self._detections(model, outputs, batch) for outputs, _ in parts], batch)

    def _detections(self, model: nn.Module, outputs: Any, batch: Batch) -> Detections:
        height, width = batch["images"].shape[-2:]
        found: Detections = self.models.detections(model, outputs, size=(height, width), most=self.options.most_boxes)
        return found

    def _together(self, parts: list[Detections], batch: Batch) -> dict[str, Tensor]:
        """The boxes of images from those of their views, with `most_boxes` entries each."""
        boxes, scores, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        boxes = in_image(boxes.float(), batch["scale"], batch["offset"])
        if len(batch["views"]) < len(boxes):
            boxes, scores, labels = self._of_tiles(boxes, scores, labels, batch)
        limit = batch["sizes"].flip(1).repeat(1, 2)[:, None].to(boxes)
        boxes, most = torch.minimum(boxes.clamp(min=0), limit), self.options.most_boxes
        missing = max(0, most - scores.shape[1])
        return {
            "boxes": functional.pad(boxes[:, :most], (0, 0, 0, missing)),
            "scores": functional.pad(scores.float()[:, :most], (0, missing)),
            "labels": functional.pad(labels[:, :most], (0, missing), value=-1),
        }

    def _of_tiles(self, boxes: Tensor, scores: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The boxes of images from those of their tiles: (images, entries, ...)."""
        counts = batch["views"].tolist()
        pictures = zip(*(torch.split(part, counts) for part in (boxes, scores, labels)), strict=True)
        merged = [self._merged(*picture) for picture in pictures]
        boxes, scores, labels = (
            pad_sequence(list(parts), batch_first=True, padding_value=fill)
            for parts, fill in zip(zip(*merged, strict=True), (0.0, 0.0, -1.0), strict=True)
        )
        return boxes, scores, labels

    def _merged(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The boxes of one image from those of its tiles (tiles, entries): the best first, without duplicates."""
        order = scores.flatten().argsort(descending=True, stable=True)
        order = order[labels.flatten()[order] >= 0]
        boxes, scores, labels = boxes.flatten(0, 1)[order], scores.flatten()[order], labels.flatten()[order]
        kept = remaining(boxes, labels, self.options.nms, count=self.options.most_boxes)
        return boxes[kept], scores[kept], labels[kept]

    def metrics(self) -> Metrics:
        """`mAP`, `mAP50`, `mAP75`, by size of the objects and by class, as in `coco_map.CocoMap.compute`."""
        from lockstep_recipes.tasks.vision.detection.coco_map import CocoMap

        return Metrics({"boxes": CocoMap(self._truth, self.classes, self.most_counted)}, self._update)

    @cached_property
    def most_counted(self) -> int:
        data = self._eval
        if data is None:
            return MOST_COUNTED
        single = ~data.annotations.crowd
        pairs = data.annotations.images[single] * len(self.classes) + data.labels[single]
        return int(max(MOST_COUNTED, np.bincount(np.unique(pairs, return_inverse=True)[1]).max(initial=0)))

    def _truth(self) -> BoxedImages:
        if self._eval is None:
            raise DataError("there are no true boxes", where="data.eval", remedy="give evaluation data with boxes")
        found: BoxedImages = self._eval
        return found

    @cached_property
    def _places(self) -> dict[int, int]:
        """The index of each evaluation image by its id."""
        return {image_id: place for place, image_id in enumerate(self._truth().annotations.image_ids.tolist())}

    def true_boxes(self, image_id: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """The true boxes of an evaluation image: boxes (n, 4) of left, top, right and bottom in pixels, class numbers
        (n), and whether each is a crowd (n). None if there is no such image."""
        if self._eval is None or image_id not in self._places:
            return None
        found = self._truth().annotations
        part = found.of_image(self._places[image_id])
        boxes = torch.from_numpy(found.boxes[part].astype(np.float32))
        boxes[:, 2:] += boxes[:, :2]
        return boxes, torch.from_numpy(self._truth().labels[part]), torch.from_numpy(found.crowd[part])

    @staticmethod
    def _update(metrics: MetricCollection, output: dict[str, Tensor], batch: Batch) -> None:
        metrics.update(output["boxes"], output["scores"], output["labels"], batch["ids"])


def _picture(sample: BoxedImage) -> AnnotatedImage:
    return AnnotatedImage.from_pixels(sample.pixels, boxes=torch.as_tensor(sample.boxes))
