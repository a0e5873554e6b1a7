"""The program of an exported detector: from squares to the boxes in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

from lockstep.core.program import Program
from lockstep_recipes.tasks.vision.detection.models import DetectionModels, Detections
from lockstep_recipes.tasks.vision.image_program import SCRIPT
from lockstep_recipes.tasks.vision.image_task import ImageTask


class DetectionTask(ImageTask):
    """What the presenter and the program read of the task."""

    @property
    def models(self) -> DetectionModels:
        """The object that makes the model, and computes its losses and boxes."""
        raise NotImplementedError

    @property
    def most_counted(self) -> int:
        """The boxes of a class that count in an image: 100 by COCO's rules, or as many as an evaluation image has."""
        raise NotImplementedError

    def true_boxes(self, image_id: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """The true boxes of an evaluation image: boxes (n, 4) of left, top, right and bottom in pixels, class numbers
        (n), and whether each is a crowd (n). None if there is no such image."""
        raise NotImplementedError


class _BoxesInSquares(nn.Module):
    """Called as `module(images=..., shapes=...)`. See `program`."""

    def __init__(self, task: DetectionTask, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, images: Tensor, shapes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        task = self.task
        normalised = task.normalised(self.model, images)
        found: Detections = task.models.candidates(self.model, normalised, shapes, most=task.options.most_boxes)
        return found.boxes, found.scores, found.labels


def program(task: DetectionTask, model: nn.Module) -> Program:
    """The program of a detector for squares.

    The inputs are `images`, float32 (squares, channels, size, size) from 0 to 255, and `shapes`, int64 (squares, 2):
    height and width of each image without padding. Models that do not accept padding get images that are stretched to
    the whole square. The outputs are boxes, scores and labels as in `Detections`, before non-maximum suppression.
    """
    size = task.options.size_for_evaluation(task.about.size)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, task.options.channels, size, size), generator=draw).float()
    shapes = torch.tensor([[size, size], [size, max(1, size // 2)]])
    return Program(
        _BoxesInSquares(task, model),
        {"images": images, "shapes": shapes},
        {"images": {0: Dim.AUTO}, "shapes": {0: Dim.AUTO}},
        {"images": images[1:], "shapes": shapes[1:]},
        script=SCRIPT,
    )
