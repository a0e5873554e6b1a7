"""Texts and figures that present data, predictions and results of segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.core.program import Program
from lockstep.drawing import drawing
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.duplicates import SplitImages
from lockstep_recipes.tasks.vision.image_presenter import ImagePresenter
from lockstep_recipes.tasks.vision.image_program import program_of_images
from lockstep_recipes.tasks.vision.image_task import ImageTask
from lockstep_recipes.tasks.vision.images.mask import encode_mask
from lockstep_recipes.tasks.vision.readers.masked_images import masked_inputs
from lockstep_recipes.tasks.vision.segmentation.losses import IGNORED
from lockstep_recipes.tasks.vision.segmentation.windows import Window, Windows

_SIDE = 720  # pixels of image, truth and prediction side by side
_ALPHA = 0.55
_LEGEND = 240  # pixels: the minimum width of a legend below an overlay
_DIGITS = 4
_EXAMPLE = 64  # pixels: the shorter side of the example of an export, if images keep their own size
_WIDER = 32  # pixels: the example of an export is not square


class SegmentationTask(ImageTask):
    """What the presenter reads of the task."""

    def logits_of_equal(self, model: nn.Module, images: Tensor) -> Tensor:
        """Logits; with `flip_at_evaluation` the logarithm of the mean of two probabilities."""
        raise NotImplementedError


class SegmentationPresenter(ImagePresenter):
    """Presents image, truth and prediction side by side, and the IoU of each class. INPUT arguments are images and
    folders of images."""

    task: SegmentationTask
    picture_side = _SIDE
    square_evaluations = False

    def inputs(self, arguments: Sequence[str]) -> Dataset[Any]:
        """The images that the arguments name: files, folders, patterns and shards."""
        about = self.task.about
        colors = [(red, green, blue) for red, green, blue in about.colors]
        return masked_inputs(
            arguments, classes=about.classes, colors=colors, channels=self.task.options.channels, levels=about.levels
        )

    @cached_property
    def _colors(self) -> Array:
        """The colour of each class in drawings: uint8 (classes, 3). Mask files use the user's own colours."""
        return drawing.distinct(self.task.about.colors)

    # ---- one sample

    def describe(self, output: Mapping[str, Tensor]) -> dict[str, Any]:
        """Height and width in pixels, and the fraction of pixels of each class that occurs."""
        classes = output["classes"]
        return {"height": classes.shape[0], "width": classes.shape[1], "shares": self._shares(classes.cpu().numpy())}

    def truth(self, sample: Any) -> dict[str, float] | None:
        """The fraction of valid pixels of each class that occurs."""
        return None if sample.mask is None else self._shares(_part(sample)[1])

    def _shares(self, numbers: Array) -> dict[str, float]:
        counts = np.bincount(numbers[numbers >= 0].reshape(-1).astype(np.int64), minlength=len(self.task.classes))
        total = max(int(counts.sum()), 1)
        pairs = zip(self.task.classes, counts.tolist(), strict=True)
        return {name: round(count / total, _DIGITS) for name, count in pairs if count}

    def mistakes(self, output: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Any]) -> Tensor | None:
        """The fraction of valid pixels of each image with a wrong class; -inf if no pixel is valid."""
        shares = []
        for part, mask in zip(output, batch["masks"], strict=True):
            valid = mask != IGNORED
            wrong = ((part["classes"].to(mask.dtype) != mask) & valid).sum().double() / valid.sum()
            shares.append(torch.where(valid.any(), wrong, -torch.inf))
        return torch.stack(shares)

    def picture(self, sample: Any, prepared: Mapping[str, Any], output: Mapping[str, Tensor] | None) -> Any:
        """The image, its true classes and the predicted classes in colour, with a legend of the classes that occur."""
        if output is None:
            image, truth = prepared["images"].permute(1, 2, 0).numpy(), prepared["masks"].numpy()
            masks, titles = [truth], ["image", "truth"]
        else:
            image, truth = _part(sample)
            predicted = output["classes"].cpu().numpy().astype(np.int32)
            masks, titles = [truth, predicted], ["image", "truth", "prediction"]
            if truth is None:
                masks, titles = [predicted], ["image", "prediction"]
        colors = self._colors
        painted = [drawing.colored_mask(image, mask, colors, _ALPHA) for mask in masks]
        side = _SIDE * (len(painted) + 1) // 3
        row = drawing.side_by_side([image, *painted], titles, side=side)
        seen = [number for number in range(len(colors)) if any((mask == number).any() for mask in masks)]
        names = [self.task.classes[number] for number in seen]
        inks = [colors[number] for number in seen]
        ignored = "ignored" if any((mask == IGNORED).any() for mask in masks) else None
        return drawing.stacked([row, drawing.legend(names, inks, width=side, ignored=ignored)])

    def caption(self, sample: Any, prepared: Mapping[str, Any], output: Mapping[str, Tensor] | None) -> str:
        """The name of the image. In evaluations, also its pixel accuracy and mean IoU."""
        lines = [str(sample.name)]
        if output is not None and sample.mask is not None:
            from lockstep_recipes.tasks.vision.segmentation import counts

            classes = self.task.classes
            truth = torch.from_numpy(np.ascontiguousarray(_part(sample)[1]))
            found = counts.summarise(counts.confusion(output["classes"].cpu(), truth, len(classes)), classes)
            scores = (
                f"pixel accuracy {found['pixel_accuracy']:.3f}, mIoU {found['miou']:.3f}"
                if found
                else "no valid pixels"
            )
            lines.append(scores)
        return "\n".join(lines)

    def files(self, sample: Any, output: Mapping[str, Tensor]) -> Mapping[str, bytes]:
        """The mask in the values of the training masks; and the image with the mask on top, above a legend of the
        classes that occur."""
        about = self.task.about
        numbers = output["classes"].cpu().numpy()
        suffix, mask = encode_mask(numbers, about.mask_kind, ids=about.ids, colors=about.colors)
        colors = self._colors
        overlay = drawing.colored_mask(_part(sample)[0], numbers.astype(np.int32), colors, _ALPHA)
        seen = np.unique(numbers).tolist()
        names = [self.task.classes[number] for number in seen]
        scale = drawing.scale_of(max(overlay.shape))
        legend = drawing.legend(names, colors[seen], width=max(_LEGEND, overlay.shape[1]), scale=scale)
        overlay = drawing.stacked([overlay, legend])
        return {f"masks/*{suffix}": mask, "overlays/*.png": drawing.png(overlay)}

    # ---- an evaluation and a run

    def report(self, values: Mapping[str, Any], samples: Sequence[tuple[Any, Any]]) -> str:
        """IoU, and percentages of true and predicted pixels of each class."""
        if "confusion" not in values:
            return ""
        from lockstep_recipes.tasks.vision.segmentation.counts import by_class

        return by_class(values, self.task.classes)

    def of_data(self, name: str, data: Any) -> list[str]:
        images = data.pictures if isinstance(data, Windows) else data
        windows = f" in {len(data):,} windows" if isinstance(data, Windows) else ""
        lines = [f"{name}: {len(images):,} images{windows}", *(f"  {note}" for note in images.notes)]
        return lines if images.cache is None else [*lines, f"  {images.cache.summary()}"]

    def samples(self, data: Any) -> SplitImages | None:
        return super().samples(data.pictures if isinstance(data, Windows) else data)

    def of_classes(self) -> list[str]:
        about = self.task.about
        lines = [f"classes: {', '.join(about.classes)}", *super().of_classes()]
        if about.unseen:
            lines.append(
                f"  these classes of the evaluation masks do not occur in training masks: {', '.join(about.unseen)}"
            )
        return lines

    def of_evaluation(self) -> list[str]:
        options = self.task.options
        if options.eval_window:
            way = f"windows of {options.eval_window} pixels that overlap by {options.eval_overlap:.0%} or more"
        elif options.eval_shape == "square":
            way = f"squares of {options.size_for_evaluation(self.task.about.size)} pixels"
        elif options.eval_size:
            way = f"shorter side {options.eval_size} pixels"
        else:
            way = "images at their own size"
        mirrored = ", with the mirror image" if options.flip_at_evaluation else ""
        return [f"evaluation: {way}{mirrored}; counted at the original resolution"]

    def program(self, model: nn.Module) -> Program:
        """Logits (images, classes, h, w) of prepared `images`, uint8 (images, channels, height, width)."""
        task = self.task
        options = task.options
        square = options.eval_shape == "square"
        if square:
            size = options.size_for_evaluation(task.about.size)
        else:  # the program may refuse smaller sizes than that of the example
            size = options.eval_window or options.eval_size or _EXAMPLE
        width = size if square else size + _WIDER
        return program_of_images(task.logits_of_equal, model, (options.channels, size, width), varies=not square)

    def preparation(self) -> dict[str, Any]:
        options = self.task.options
        return super().preparation() | {
            **({} if options.eval_shape == "square" else {"size": options.eval_size}),
            "eval_shape": options.eval_shape,
            "eval_window": options.eval_window,
            "eval_overlap": options.eval_overlap,
        }


def _part(sample: Any) -> tuple[Array, Any]:
    """Pixels and mask of an image; for a window, those of its core, which the output covers."""
    if not isinstance(sample, Window):
        return sample.pixels, sample.mask
    (top, left, _, _), (core_top, core_left, height, width) = sample.tile
    inside = (slice(core_top - top, core_top - top + height), slice(core_left - left, core_left - left + width))
    return sample.pixels[inside], None if sample.mask is None else sample.mask[inside]
