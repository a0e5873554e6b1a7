"""Texts and figures that present data, predictions and results of detection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lockstep.core.program import Program
from lockstep.drawing import diagrams, drawing
from lockstep_recipes.tasks.readers import duplicates
from lockstep_recipes.tasks.vision.detection import program
from lockstep_recipes.tasks.vision.detection.matching import Matched, match
from lockstep_recipes.tasks.vision.detection.options import MOST_COUNTED
from lockstep_recipes.tasks.vision.detection.program import DetectionTask
from lockstep_recipes.tasks.vision.image_presenter import ImagePresenter
from lockstep_recipes.tasks.vision.readers.boxed_images import BoxedImage
from lockstep_recipes.tasks.vision.readers.coco_inputs import CocoNumbers, RunSource, UnlabelledImages, coco_inputs

_SIDE = 960  # pixels of image, truth and prediction side by side
_DIGITS, _MORE_DIGITS = 4, 6
_RECALLS = np.linspace(0, 1, 101)  # pycocotools' `recThrs`

Output = Mapping[str, Tensor]


class DetectionPresenter(ImagePresenter):
    """Presents image, true and detected boxes side by side, and the average precision of each class. INPUT arguments
    are images, folders of images, and a COCO file that names images."""

    task: DetectionTask
    picture_side = _SIDE

    def __init__(self, task: DetectionTask) -> None:
        super().__init__(task)
        self._numbers: CocoNumbers | None = None
        """The ids of the images of `inputs`. None: the samples are evaluation samples."""

    def inputs(self, arguments: Sequence[str]) -> UnlabelledImages:
        """The images that the arguments name: files, folders, patterns, shards, and a COCO file.

        Images have the ids of this file, or of the run's own COCO file; see `coco_inputs`.
        """
        task, options = self.task, self.task.options
        sources = [RunSource(task.train_source, "train", options.images)]
        if task.eval_source is not None:
            sources.insert(0, RunSource(task.eval_source, "eval", options.eval_images or options.images))
        found = coco_inputs(arguments, sources=sources, channels=options.channels, levels=self.task.about.levels)
        self._numbers = found.numbers
        return found

    # ---- one sample

    def describe(self, output: Output) -> dict[str, Any]:
        """`boxes`: boxes with at least `score_threshold`, the best first, with class, score, and left, top, right and
        bottom in pixels of the original image. `best_score`: the highest score of any box; 0 without boxes."""
        boxes, scores, labels = _shown(output, self.task.options.score_threshold)
        return {
            "boxes": [
                {"class": self.task.classes[label], "score": round(score, _DIGITS), "box": _rounded(box)}
                for box, score, label in zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)
            ],
            # After a short run, the best scores of images differ only in digits that would not be shown.
            "best_score": round(float(output["scores"].max()), _MORE_DIGITS) if len(output["scores"]) else 0.0,
        }

    def truth(self, sample: BoxedImage) -> list[dict[str, Any]]:
        """The true boxes."""
        pairs = zip(np.asarray(sample.boxes).tolist(), np.asarray(sample.labels).tolist(), strict=True)
        return [{"class": self.task.classes[label], "box": _rounded(box)} for box, label in pairs]

    def rows(self, sample: BoxedImage, output: Output) -> list[dict[str, Any]]:
        """A row of COCO's results for each box of any score.

        `image_id`, for images with an id in a COCO file; `file_name`; `category_id`, from the same file, or from the
        training data (-1: the file does not declare the class); `bbox` (left, top, width and height in pixels);
        `score`; and `class`, its name.
        """
        from lockstep_recipes.tasks.vision.detection.coco_map import width_and_height

        boxes, scores, labels = (part.cpu().numpy() for part in _shown(output, 0.0))
        has_id, categories = self._category_ids()
        picture: dict[str, Any] = {"file_name": str(sample.name)}
        if has_id and sample.image_id is not None:
            picture = {"image_id": int(sample.image_id), **picture}
        rows = zip(width_and_height(boxes).tolist(), scores.tolist(), labels.tolist(), strict=True)
        classes = self.task.classes
        return [
            {**picture, "category_id": categories[label], "bbox": box, "score": score, "class": classes[label]}
            for box, score, label in rows
        ]

    def _category_ids(self) -> tuple[bool, Sequence[int]]:
        """Whether image ids are from a COCO file, and the number of each class in this file."""
        about = self.task.about
        if self._numbers is None:
            data: Any = self.task.eval_data()
            return data.annotations.files is None, data.category_ids.tolist()
        named = self._numbers.category_ids
        return True, about.category_ids if named is None else [named.get(name, -1) for name in about.classes]

    def files(self, sample: BoxedImage, output: Output) -> Mapping[str, bytes]:
        """The image with its boxes of at least `score_threshold`, and below it a legend of their classes."""
        boxes, scores, labels = self._in_pixels(sample, output)
        drawn = self._drawn(sample.pixels, boxes, labels, scores)
        scale = drawing.scale_of(max(drawn.shape))
        return {"boxes/*.png": drawing.png(self._with_legend(drawn, labels, scale=scale))}

    def _in_pixels(self, sample: BoxedImage, output: Output) -> tuple[Tensor, Tensor, Tensor]:
        """The boxes to show, in pixels of the sample, which the cache may have reduced; their scores and labels."""
        boxes, scores, labels = _shown(output, self.task.options.score_threshold)
        height, width = (now / size for now, size in zip(sample.pixels.shape[:2], sample.size, strict=True))
        return boxes * boxes.new_tensor([width, height, width, height]), scores, labels

    def picture(self, sample: BoxedImage, prepared: Mapping[str, Any], output: Output | None) -> Any:
        """The image, next to it the true boxes and the detected boxes with at least `score_threshold`, with a legend of
        the classes that occur. A training sample is shown as the model sees it."""
        third = _SIDE // 3
        if output is None:
            view, labels = prepared["views"][0].picture, prepared["labels"][0]
            image = view.image.permute(1, 2, 0).numpy()
            row = [image, self._drawn(image, view.boxes, labels, side=third)]
            drawn = drawing.side_by_side(row, ["image", "truth"], side=2 * third)
            return self._with_legend(drawn, labels)
        boxes, scores, labels = self._in_pixels(sample, output)
        true = torch.as_tensor(sample.labels)
        row = [
            sample.pixels,
            self._drawn(sample.pixels, torch.as_tensor(sample.boxes), true, side=third),
            self._drawn(sample.pixels, boxes, labels, scores, side=third),
        ]
        drawn = drawing.side_by_side(row, ["image", "truth", "prediction"], side=_SIDE)
        return self._with_legend(drawn, torch.cat([true, labels.cpu()]))

    def _drawn(
        self, image: Any, boxes: Tensor, labels: Tensor, scores: Tensor | None = None, side: int | None = None
    ) -> Any:
        """The image with boxes in the colours of their classes; the best box is drawn last. Boxes with scores have
        captions."""
        order = list(reversed(range(len(boxes))))
        colors = drawing.palette(len(self.task.classes))[labels.cpu().numpy()].reshape(-1, 3)[order]
        corners, texts = boxes.cpu().numpy()[order], []
        if scores is not None:
            pairs = [(self.task.classes[label], f"{score:.2f}") for label, score in zip(labels, scores, strict=True)]
            texts = [(f"{pairs[place][0]} {pairs[place][1]}", pairs[place][1]) for place in order]
        return drawing.with_boxes(image, corners, texts, colors, side=side)

    def _with_legend(self, picture: Any, labels: Tensor, scale: float = 1.0) -> Any:
        """The image, and below it the names and colours of the classes that occur."""
        seen = sorted(set(labels.tolist()))
        if not seen:
            return picture
        colors = drawing.palette(len(self.task.classes))[seen]
        names = [self.task.classes[label] for label in seen]
        return drawing.stacked([picture, drawing.legend(names, colors, width=picture.shape[1], scale=scale)])

    def caption(self, sample: BoxedImage, prepared: Mapping[str, Any], output: Output | None) -> str:
        """The name of the image. In evaluations, also the numbers of true boxes, missed boxes and false positives."""
        lines = [str(sample.name)]
        if output is not None:
            found, _, labels = self._in_pixels(sample, output)
            true = (torch.as_tensor(part) for part in (sample.boxes, sample.labels, sample.crowd))
            matched = match(found, labels, *true)
            lines.append(f"{len(sample.boxes)} boxes, {matched.missed} missed, {matched.invented} false positives")
        return "\n".join(lines)

    def _matched(self, output: Output, boxes: Tensor, labels: Tensor, crowd: Tensor) -> Matched:
        """The boxes to show, matched with true boxes in pixels of the original image."""
        found, _, found_labels = _shown(output, self.task.options.score_threshold)
        return match(found.cpu().float(), found_labels.cpu(), boxes.float(), labels, crowd)

    def mistakes(self, output: Output, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The number of missed boxes and false positives of each image, for boxes with at least `score_threshold`;
        -inf for an image without a known truth."""
        numbers = []
        for place, image_id in enumerate(batch["ids"].tolist()):
            true = self.task.true_boxes(image_id)
            if true is None:
                numbers.append(-torch.inf)
                continue
            matched = self._matched({name: part[place] for name, part in output.items()}, *true)
            numbers.append(float(matched.missed + matched.invented))
        return torch.tensor(numbers)

    # ---- an evaluation and a run

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """The average precision of each class."""
        lines = [
            f"  {name}: {float(values[f'mAP/{name}']):.3f}" for name in self.task.classes if f"mAP/{name}" in values
        ]
        return "\n".join(["average precision by class (IoU 0.50 to 0.95):", *lines]) if lines else ""

    def pictures(self, values: Mapping[str, Tensor]) -> Mapping[str, npt.NDArray[np.uint8]]:
        """`precision_recall`: the precision-recall curve of each class, at IoU 0.50."""
        if "precision_recall" not in values:
            return {}
        pairs = zip(self.task.classes, values["precision_recall"].cpu().numpy(), strict=True)
        series = {f"{name} {row.mean():.2f}": (_RECALLS, row) for name, row in pairs if (row > -1).all()}
        if not series:
            return {}
        title = "precision-recall curve at IoU 0.50, with the average precision"
        return {"precision_recall": diagrams.panels({"": series}, title=title, x_label="recall", y_label="precision")}

    def of_data(self, name: str, data: Any) -> list[str]:
        counts, empty = data.class_counts(), int((data.counts == 0).sum())
        without = f", {empty:,} without a box" if empty else ""
        lines = [f"{name}: {len(data):,} images, {int(data.counts.sum()):,} boxes{without}"]
        lines.append("  by class: " + ", ".join(f"{label} {counts[label]:,}" for label in self.task.classes))
        if data.cache is not None:
            lines.append(f"  {data.cache.summary()}")
        lines += [f"  {line}" for line in duplicates.of_boxes(data.annotations)]
        return lines + [f"  {note}" for note in data.notes]

    def of_evaluation(self) -> list[str]:
        task, tile = self.task, self.task.options.tile
        lines = [f"evaluation: images larger than {tile} pixels are split into tiles"] if tile else []
        if task.most_counted > MOST_COUNTED:
            lines.append(
                f"evaluation: an image has {task.most_counted:,} objects of a class, so as many boxes count; by COCO's "
                f"rules it would be {MOST_COUNTED}, and no detector could find the others"
            )
        data, most = task.eval_data(), task.options.most_boxes
        if data is not None and (largest := int(data.counts.max(initial=0))) > most:
            share = float(np.minimum(data.counts, most).sum() / data.counts.sum())
            what = f"an image has {largest:,} boxes, but a prediction at most task.most_boxes={most}"
            lines.append(f"WARNING: evaluation: {what}: the recall cannot exceed {share:.3f}. Increase it")
        return lines

    def program(self, model: nn.Module) -> Program:
        """Boxes, scores and labels in squares: see `detection.program`."""
        return program.program(self.task, model)

    def preparation(self) -> dict[str, Any]:
        task, options = self.task, self.task.options
        return super().preparation() | {
            "tile": options.tile,
            "tile_overlap": options.tile_overlap,
            "nms": options.nms,
            "nms_of_model": options.nms if task.models.suppresses else None,
            "stretched": task.models.stretches,
            "most_boxes": options.most_boxes,
            "score_threshold": options.score_threshold,
            "fill": options.augment.fill,
        }


def _shown(output: Output, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, scores and labels of one image, without empty entries and boxes with lower scores."""
    kept = (output["labels"] >= 0) & (output["scores"] >= threshold)
    return output["boxes"][kept], output["scores"][kept], output["labels"][kept]


def _rounded(box: Sequence[float]) -> list[float]:
    return [round(edge, 2) for edge in box]
