"""Image classification: the embedded digits, or folders of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from lockstep.errors import DataError
from lockstep.sources.images import DIGITS_CLASSES, Digits, Images, LabelledImage, image_folder
from lockstep.tasks.classification.convnet import ConvNet
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = tuple[Tensor, Tensor]


@final
class Classification(Task):
    """One label per image; cross-entropy summed over samples; accuracy.

    Args:
        train, eval: `digits`, or a folder with one folder per class; eval may be None.
        image_size: images from folders are resized to this square (digits stay 8x8).
        channels: 1 or 3.
        width: of the convolutional network.
        shift: in training, move each image by up to so many pixels in each direction.
    """

    def __init__(
        self,
        train: str,
        eval: str | None = None,
        image_size: int = 32,
        channels: int = 3,
        width: int = 32,
        shift: int = 0,
    ) -> None:
        self.train_source, self.eval_source = train, eval
        self.image_size, self.channels, self.width, self.shift = (
            8 if train == "digits" else image_size,
            channels,
            width,
            shift,
        )

    @cached_property
    def _train(self) -> tuple[Dataset[LabelledImage], list[str]]:
        if self.train_source == "digits":
            return Digits(training=True), DIGITS_CLASSES
        return image_folder(self.train_source, self.image_size, self.channels)

    @property
    def classes(self) -> list[str]:
        """Class names, in the order of the logits."""
        return self._train[1]

    def model(self) -> nn.Module:
        return ConvNet(self.channels, len(self.classes), self.image_size, self.width)

    def train_data(self) -> Dataset[LabelledImage]:
        return self._train[0]

    def eval_data(self) -> Dataset[LabelledImage] | None:
        if self.eval_source == "digits":
            return Digits(training=False)
        if self.eval_source is None:
            return None
        return image_folder(self.eval_source, self.image_size, self.channels, self.classes)[0]

    def prepare(self, sample: LabelledImage, epoch: int, training: bool) -> tuple[Tensor, int]:
        image, label = sample
        if not -1 <= label < len(self.classes):
            raise DataError(f"label {label} is out of range", remedy=f"labels are 0 to {len(self.classes) - 1}")
        if training and self.shift:
            padded = functional.pad(image, [self.shift] * 4)
            top, left = torch.randint(0, 2 * self.shift + 1, (2,)).tolist()
            image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        return image.float() / 127.5 - 1, label

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        probabilities: Tensor = model(batch[0]).float().softmax(dim=-1)
        return probabilities

    def metrics(self) -> MetricCollection:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(len(self.classes), average="micro")})

    def loss_and_output(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return functional.cross_entropy(logits, batch[1], reduction="sum"), logits.float().softmax(dim=-1)

    def input_data(self, inputs: Sequence[str]) -> Images:
        paths = [Path(name) for name in inputs]
        return Images(paths, [-1] * len(paths), self.image_size, self.channels)

    def describe(self, output: Tensor) -> dict[str, Any]:
        best = int(output.argmax())
        return {"prediction": self.classes[best], "probability": round(float(output[best]), 4)}

    def truth(self, sample: LabelledImage) -> str | None:
        return self.classes[sample[1]] if sample[1] >= 0 else None
