"""Convert images and boxes of a batch to the inputs of transformers' detectors, and their outputs to boxes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lockstep_recipes.tasks.vision.detection.models import Detections, Targets
from lockstep_recipes.tasks.vision.detection.transformers_losses import Labels, Predictions


class Outputs(NamedTuple):
    """The detections of a transformers detector in a batch."""

    predictions: Predictions
    shapes: Tensor
    """int64 (images, 2): height and width of each image without padding. Boxes are fractions of this area."""


def inside_of(shapes: Tensor, size: tuple[int, int]) -> Tensor:
    """True for pixels that are not padding: bool (images, height, width).

    Args:
        shapes: int64 (images, 2): height and width of each image without padding.
        size: height and width of the images with padding.
    """
    rows = torch.arange(size[0], device=shapes.device) < shapes[:, :1]
    columns = torch.arange(size[1], device=shapes.device) < shapes[:, 1:]
    return rows[:, :, None] & columns[:, None, :]


def stretch(images: Tensor, shapes: Tensor) -> Tensor:
    """The images without their padding, stretched to their size with padding.

    Args:
        images: (images, channels, height, width).
        shapes: int64 (images, 2): height and width of each image without padding.
    """
    if images.is_meta:  # only its size is known
        return images
    size = (images.shape[-2], images.shape[-1])
    parts = [
        image if (height, width) == size else _resized(image[:, :height, :width], size)
        for image, (height, width) in zip(images, shapes.tolist(), strict=True)
    ]
    return torch.stack(parts)


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0]


def labels_of(targets: Targets, dtype: torch.dtype) -> Labels:
    """The true boxes in the form that transformers models take: centre, width and height as fractions of the image."""
    labels = []
    for (boxes, classes), (height, width) in zip(targets.by_picture(), targets.shapes.tolist(), strict=True):
        left, top, right, bottom = (boxes.to(dtype) / boxes.new_tensor([width, height, width, height])).unbind(1)
        shares = torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], dim=1)
        labels.append({"class_labels": classes, "boxes": shares})
    return labels


def boxes_of(outputs: Outputs, *, scores: Literal["softmax", "sigmoid"], most: int) -> Detections:
    """The best boxes of each image, chosen like transformers' image processors do.

    Args:
        scores: `softmax`: each query has a box of its most probable class; the last logit means that there is no
            object. `sigmoid`: each pair of a query and a class may be a box.
        most: the maximum number of boxes per image. The result has this many entries, or as many as the model has
            boxes.
    """
    predictions = outputs.predictions
    logits, queries = predictions.logits, predictions.logits.shape[1]
    if scores == "softmax":
        best, labels = logits.softmax(-1)[..., :-1].max(-1)
        found, chosen = best.topk(min(most, queries), dim=1)
        labels = labels.gather(1, chosen)
    else:
        found, pairs = logits.sigmoid().flatten(1).topk(min(most, logits[0].numel()), dim=1)
        chosen, labels = pairs // logits.shape[-1], pairs % logits.shape[-1]
    centre_x, centre_y, width, height = predictions.boxes.unbind(-1)
    corners = [centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2]
    boxes = torch.stack(corners, dim=-1) * outputs.shapes.flip(1).repeat(1, 2)[:, None].to(logits.dtype)
    boxes = boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
    return Detections(boxes.float(), found.float(), labels)
