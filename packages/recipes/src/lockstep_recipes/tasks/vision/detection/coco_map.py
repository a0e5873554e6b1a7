"""COCO's mean average precision, computed by pycocotools, on any number of ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep.core.errors import DataError, UsageError
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.detection.options import MOST_COUNTED
from lockstep_recipes.tasks.vision.readers.boxed_images import BoxedImages


class CocoMap(Metric):
    """Average precision of boxes, exactly as pycocotools computes it on one process.

    Each rank keeps at most `most` boxes per image and class, 22 bytes each, and 12 bytes per image. Rank 0 gets those
    of all ranks, and calls pycocotools class by class, so that only the objects of one class exist at a time.

    Args:
        truth: returns the images with their true boxes. It is called when the metric is computed.
        classes: names of the classes.
        most: boxes that count per image and class. More objects than this could not all be found.
    """

    full_state_update = False
    boxes: list[Tensor]
    labels: list[Tensor]
    counts: list[Tensor]
    ids: list[Tensor]

    def __init__(self, truth: Callable[[], BoxedImages], classes: Sequence[str], most: int = MOST_COUNTED) -> None:
        super().__init__()
        cocoeval()  # if pycocotools is missing, fail before training
        self.truth, self.classes, self.most = truth, list(classes), most
        for name in ("boxes", "labels", "counts", "ids"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, boxes: Tensor, scores: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Add the boxes of a batch.

        Args:
            boxes: (images, entries, 4): left, top, right, bottom in pixels of the original image.
            scores: (images, entries).
            labels: (images, entries): class numbers. -1 for entries without a box.
            ids: int64 (images): the ids of the images.
        """
        kept = among_best(scores.cpu(), labels.cpu(), self.most)
        rows = torch.cat([boxes.detach().float().cpu(), scores.detach().float().cpu()[..., None]], -1)
        self.boxes.append(rows[kept])
        self.labels.append(labels.cpu()[kept].to(torch.int16))
        self.counts.append(kept.sum(1).to(torch.int32))
        self.ids.append(ids.cpu().to(torch.int64))

    def compute(self) -> dict[str, Tensor]:
        """The results of pycocotools.

        Returns:
            `mAP`, `mAP50`, `mAP75`: the means over classes, at IoU 0.50 to 0.95, 0.50 and 0.75; `mAP_small`,
            `mAP_medium`, `mAP_large`: by area, below 32 x 32, below 96 x 96 and above; `mAR`: the mean recall with
            `most` boxes per image and class; `mAP/CLASS`: for each class. Sizes and classes without any true box are
            left out. All other values are -1 if there are no true boxes at all. `precision_recall`: (classes, 101), the
            precision at IoU 0.50 where the recall is 0, 0.01, ... 1; -1 for classes without a true box.

        Raises:
            DataError: an image is not in the data, or occurs twice.
        """
        rows, labels = (_joined(part) for part in (self.boxes, self.labels))
        counts, ids = (_joined(part) for part in (self.counts, self.ids))
        precision, recall = evaluate_classes(
            self.truth(),
            seen=ids,
            boxes=rows[:, :4] if len(rows) else np.zeros((0, 4), np.float32),
            scores=rows[:, 4] if len(rows) else np.zeros(0, np.float32),
            labels=labels,
            images=np.repeat(ids, counts),
            most=self.most,
        )
        return summary(precision, recall, self.classes)


def among_best(scores: Tensor, labels: Tensor, most: int = MOST_COUNTED) -> Tensor:
    """True for the `most` best boxes of each image and class; of two equal boxes, the earlier one is better.

    Args:
        scores, labels: (images, entries); the label -1 marks entries without a box.

    Returns:
        bool (images, entries).
    """
    kept = labels >= 0
    if scores.shape[1] <= most:
        return kept
    order = scores.argsort(dim=1, descending=True, stable=True)
    by_class = labels.gather(1, order).argsort(dim=1, stable=True)
    order = order.gather(1, by_class)  # by class, and within a class the best first
    sorted_labels = labels.gather(1, order)
    begins = torch.ones_like(sorted_labels, dtype=torch.bool)
    begins[:, 1:] = sorted_labels[:, 1:] != sorted_labels[:, :-1]
    place = torch.arange(scores.shape[1]).expand_as(order)
    number = place - torch.where(begins, place, 0).cummax(1).values
    return kept & torch.zeros_like(kept).scatter(1, order, number < most)


def evaluate_classes(
    truth: BoxedImages,
    *,
    seen: Array,
    boxes: Array,
    scores: Array,
    labels: Array,
    images: Array,
    most: int = MOST_COUNTED,
) -> tuple[Array, Array]:
    """The arrays `precision` and `recall` of pycocotools' `COCOeval.accumulate` over all classes.

    Args:
        seen: ids of the images that were evaluated.
        boxes: (n, 4) left, top, right, bottom in pixels of the original image.
        scores, labels: (n).
        images: (n): ids of the images.
        most: boxes that count per image and class.

    Returns:
        (IoU, recall, classes, areas, maxDets) and (IoU, classes, areas, maxDets), with the classes by number.

    Raises:
        DataError: an image is not in the data, or occurs twice.
    """
    all_ = truth.annotations
    known, twice = np.isin(seen, all_.image_ids), len(np.unique(seen)) != len(seen)
    if not known.all() or twice:
        what = "an image was evaluated twice" if twice else f"there is no image with the id {seen[~known][0]}"
        raise DataError(what, where="the evaluation data", remedy="give each image its own id")
    box_images = all_.image_ids[all_.images]
    counted = np.isin(box_images, seen)
    arrays = {}
    xywh = width_and_height(boxes)
    number_of = np.argsort(truth.category_ids, kind="stable")  # pycocotools takes categories in the order of their ids
    for label in number_of.tolist():
        category = int(truth.category_ids[label])
        places = np.flatnonzero(counted & (truth.labels == label))
        columns = (all_.ids, box_images, all_.boxes, all_.area, all_.crowd)
        rows = zip(*(column[places] for column in columns), strict=True)
        true = [_box(number, image, category, box, area, crowd) for number, image, box, area, crowd in rows]
        found = []
        for number, place in enumerate(np.flatnonzero(labels == label).tolist(), start=1):
            box = _box(number, images[place], category, xywh[place], xywh[place, 2] * xywh[place, 3])
            found.append({**box, "score": float(scores[place])})
        arrays[label] = _evaluate_class(category, true, found, most)
    precision, recall = (
        np.concatenate([arrays[label][part] for label in range(len(truth.category_ids))], axis=axis)
        for part, axis in ((0, 2), (1, 1))
    )
    return precision, recall


def _box(number: int, image: int, category: int, xywh: Array, area: float, crowd: bool = False) -> dict[str, Any]:
    """A box in the form of pycocotools: left, top, width and height."""
    ids = {"id": int(number), "image_id": int(image), "category_id": category}
    return {**ids, "bbox": xywh.tolist(), "area": float(area), "iscrowd": int(crowd)}


def width_and_height(boxes: Array) -> Array:
    """float64 (n, 4): left, top, width and height of boxes (n, 4) of left, top, right and bottom."""
    edges = boxes.astype(np.float64)
    edges[:, 2:] -= edges[:, :2]
    return edges


def _evaluate_class(
    category: int, true: list[dict[str, Any]], found: list[dict[str, Any]], most: int
) -> tuple[Array, Array]:
    """Precision and recall of one class by pycocotools, for the images with true or detected boxes of it."""
    evaluation = cocoeval()(iouType="bbox")
    images = sorted({box["image_id"] for box in true} | {box["image_id"] for box in found})
    with _quiet():
        evaluation.cocoGt, evaluation.cocoDt = (_coco(boxes, images, category) for boxes in (true, found))
        evaluation.params.maxDets[-1] = most
        evaluation.params.imgIds, evaluation.params.catIds = images, [category]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval["precision"], evaluation.eval["recall"]


def _coco(boxes: list[dict[str, Any]], images: list[int], category: int) -> Any:
    coco = importlib.import_module("pycocotools.coco").COCO()
    categories = [{"id": category}]
    coco.dataset = {"images": [{"id": image} for image in images], "annotations": boxes, "categories": categories}
    coco.createIndex()
    return coco


def summary(precision: Array, recall: Array, classes: Sequence[str]) -> dict[str, Tensor]:
    """The results of `CocoMap.compute` from pycocotools' arrays; the means are those of `COCOeval.summarize`."""

    def mean(values: Array) -> float:
        valid = values[values > -1]
        return float(np.mean(valid)) if valid.size else -1.0

    everywhere, half, three_quarters = slice(None), 0, 5  # indices of the IoUs 0.50 and 0.75
    values = {
        "mAP": mean(precision[..., 0, -1]),
        "mAP50": mean(precision[half, ..., 0, -1]),
        "mAP75": mean(precision[three_quarters, ..., 0, -1]),
        "mAR": mean(recall[..., 0, -1]),
    }
    optional = {f"mAP_{name}": mean(precision[..., 1 + area, -1]) for area, name in enumerate(_AREAS)}
    optional |= {f"mAP/{name}": mean(precision[everywhere, :, number, 0, -1]) for number, name in enumerate(classes)}
    values |= {name: value for name, value in optional.items() if value > -1}
    curve = torch.from_numpy(precision[half, :, :, 0, -1].T.copy())
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()} | {
        "precision_recall": curve
    }


_AREAS = ("small", "medium", "large")


def cocoeval() -> Any:
    """pycocotools' class `COCOeval`.

    Raises:
        UsageError: pycocotools cannot be imported.
    """
    where, remedy = "the evaluation of a detector", "pip install pycocotools"
    return optional("pycocotools.cocoeval", where=where, remedy=remedy, kind=UsageError).COCOeval


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence pycocotools, which prints its progress."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _joined(parts: Any) -> Array:
    """A state as one array: a list of tensors, or a tensor if torchmetrics has already joined them."""
    tensors = [parts] if isinstance(parts, Tensor) else list(parts)
    joined: Array = torch.cat(tensors).cpu().numpy() if tensors else np.zeros(0, np.int64)
    return joined
