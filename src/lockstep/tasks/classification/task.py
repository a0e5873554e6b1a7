"""Image classification: the embedded digits, or folders of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from lockstep.errors import DataError
from lockstep.sources.images import DIGITS_CLASSES, IMAGE_SUFFIXES, Digits, Images, LabelledImage, image_folder
from lockstep.sources.input_files import find_files
from lockstep.tasks.classification.convnet import ConvNet
from lockstep.tasks.classification.options import ClassificationOptions
from lockstep.tasks.presenter import Presenter
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = tuple[Tensor, Tensor]


class ClassificationPresenter(Presenter):
    """Shows the most probable class. INPUT arguments are image files, folders and patterns."""

    task: Classification

    def inputs(self, arguments: Sequence[str]) -> Images:
        paths = find_files(arguments, IMAGE_SUFFIXES)
        return Images(paths, [-1] * len(paths), size=self.task.image_size, channels=self.task.options.channels)

    def describe(self, output: Tensor) -> dict[str, Any]:
        best = int(output.argmax())
        return {"prediction": self.task.classes[best], "probability": round(float(output[best]), 4)}

    def truth(self, sample: LabelledImage) -> str | None:
        return self.task.classes[sample[1]] if sample[1] >= 0 else None


@final
class Classification(Task):
    """Each image has a label. The loss is the cross-entropy, summed over samples. The metric is accuracy.

    Args:
        train, eval: `digits`, or a folder with a folder for each class. eval may be None.
    """

    presenter = ClassificationPresenter

    def __init__(self, options: ClassificationOptions, train: str, eval: str | None = None) -> None:
        self.options, self.train_source, self.eval_source = options, train, eval
        self.image_size = 8 if train == "digits" else options.image_size

    @cached_property
    def _train(self) -> tuple[Dataset[LabelledImage], list[str]]:
        if self.train_source == "digits":
            return Digits(training=True), DIGITS_CLASSES
        return image_folder(self.train_source, size=self.image_size, channels=self.options.channels)

    @property
    def classes(self) -> list[str]:
        """Class names, in the order of the logits."""
        return self._train[1]

    def model(self) -> nn.Module:
        return ConvNet(
            channels=self.options.channels,
            classes=len(self.classes),
            image_size=self.image_size,
            width=self.options.width,
        )

    def train_data(self) -> Dataset[LabelledImage]:
        return self._train[0]

    def eval_data(self) -> Dataset[LabelledImage] | None:
        if self.eval_source == "digits":
            return Digits(training=False)
        if self.eval_source is None:
            return None
        size, channels = self.image_size, self.options.channels
        return image_folder(self.eval_source, size=size, channels=channels, classes=self.classes)[0]

    def prepare(self, sample: LabelledImage, epoch: int, training: bool) -> tuple[Tensor, int]:
        image, label = sample
        if not -1 <= label < len(self.classes):
            raise DataError(f"label {label} is out of range", remedy=f"labels are 0 to {len(self.classes) - 1}")
        shift = self.options.shift
        if training and shift:
            padded = functional.pad(image, [shift] * 4)
            top, left = torch.randint(0, 2 * shift + 1, (2,)).tolist()
            image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        return image.float() / 127.5 - 1, label

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        logits = model(batch[0])
        loss = functional.cross_entropy(logits, batch[1], reduction="sum")
        return loss if model.training else (loss, self._probabilities(logits))

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Probabilities by class: (samples, classes)."""
        return self._probabilities(model(batch[0]))

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(dim=-1)

    def metrics(self) -> MetricCollection:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(len(self.classes), average="micro")})
