"""The interface of detection tasks to the detector that does not need pretrained weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.detection.center_detector import CenterDetector, CenterOutput, best_boxes, group_norm
from lockstep_recipes.tasks.vision.detection.center_losses import center_losses
from lockstep_recipes.tasks.vision.detection.models import DetectionModels, Detections, Targets
from lockstep_recipes.tasks.vision.detection.options import CENTER
from lockstep_recipes.tasks.vision.image_models import Pixels

_SIZE = 320  # default size in pixels
_SIZES = {
    "width": (32, 16),
    "depth": (1, 1),
    "levels": (4, 1),
}  # key: default, and the number that it must be a multiple of
_BOX = 5.0  # as in the paper of `center_losses`, section 3.4


@dataclass(frozen=True)
class CenterModels(DetectionModels):
    """Makes `CenterDetector`, and computes its losses and boxes."""

    suppresses = True

    def pixels(self) -> Pixels:
        return Pixels(_SIZE)

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        sizes = {key: default for key, (default, _) in _SIZES.items()}
        for key, value in self.options.scratch.sizes.items():
            where = f"task.scratch.sizes.{key}"
            if key not in _SIZES:
                remedy = f"{CENTER} takes: {', '.join(_SIZES)}; for a different model, set task.scratch.architecture"
                raise UsageError("unknown key", where=where, remedy=remedy)
            multiple = _SIZES[key][1]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % multiple:
                remedy = f"use a positive multiple of {multiple}" if multiple > 1 else "use a positive integer"
                raise UsageError(f"{value!r}", where=where, remedy=remedy)
            sizes[key] = value
        norm = group_norm if self.options.batch_norm == "group" else nn.BatchNorm2d
        return CenterDetector(self.options.channels, len(classes), **sizes, norm=norm), []

    def coefficients(self) -> Mapping[str, float]:
        return {"box": _BOX}

    def weights(self, targets: Targets) -> dict[str, Tensor]:
        return {"center": targets.units(), "box": targets.counts.sum().float()}

    def forward(self, model: nn.Module, images: Tensor, shapes: Tensor, targets: Targets | None) -> Any:
        return model(images)

    def losses(self, model: nn.Module, outputs: CenterOutput, targets: Targets) -> dict[str, Tensor]:
        return center_losses(outputs, targets)

    def detections(self, model: nn.Module, outputs: CenterOutput, *, size: tuple[int, int], most: int) -> Detections:
        return Detections(*best_boxes(outputs, size=size, most=most, overlap=self.options.nms))

    def candidates(self, model: nn.Module, images: Tensor, shapes: Tensor, *, most: int) -> Detections:
        return Detections(*best_boxes(model(images), size=(images.shape[-2], images.shape[-1]), most=most, overlap=1.0))
