"""Texts and figures that present data, predictions and results of image classification."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.data.dataset import member_of
from lockstep.core.errors import number_of
from lockstep.core.program import Program
from lockstep_recipes.tasks import confusion
from lockstep_recipes.tasks.readers.labels import count_labels
from lockstep_recipes.tasks.vision.classification.options import SMALL, ClassificationOptions, Decided
from lockstep_recipes.tasks.vision.image_presenter import ImagePresenter
from lockstep_recipes.tasks.vision.image_program import program_of_images
from lockstep_recipes.tasks.vision.image_task import ImageTask
from lockstep_recipes.tasks.vision.readers.class_table import listed
from lockstep_recipes.tasks.vision.readers.decoded_images import DecodedImage
from lockstep_recipes.tasks.vision.readers.image_records import ImageRecord, ImageRecords, unlabelled_images

Sample = ImageRecord | DecodedImage | tuple[Tensor, int]
_FEW = 30  # up to this many classes, results are listed by class


class ClassificationTask(ImageTask):
    """What the presenter reads of the task."""

    options: ClassificationOptions

    @property
    def decided(self) -> Decided:
        """The options with `auto` replaced for the training images."""
        raise NotImplementedError

    @property
    def held_back(self) -> str | None:
        """A sentence about the images that are held back for evaluation. None: none should be held back."""
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Probabilities by class: (samples, classes)."""
        raise NotImplementedError


class ClassificationPresenter(ImagePresenter):
    """Presents the most probable classes, and results by class. INPUT arguments are images and folders of images."""

    task: ClassificationTask

    def inputs(self, arguments: Sequence[str]) -> ImageRecords:
        """The images that the arguments name: files, folders, patterns and shards."""
        return unlabelled_images(arguments)

    def describe(self, output: Tensor) -> dict[str, Any]:
        """The most probable class, its probability, and with `top_k` above 1 the most probable classes by name."""
        classes = self.task.classes
        values, places = output.topk(min(self.task.options.top_k, len(classes)))
        top = {classes[place]: round(value, 4) for place, value in zip(places.tolist(), values.tolist(), strict=True)}
        best = next(iter(top))
        described: dict[str, Any] = {"prediction": best, "probability": top[best]}
        return described | ({"top": top} if len(top) > 1 else {})

    def truth(self, sample: Sample) -> str | None:
        label = int(sample[1])
        return self.task.classes[label] if label >= 0 else None

    def picture(self, sample: Sample, prepared: Mapping[str, Any], output: Tensor | None) -> Any:
        """The image of a prepared sample for display: uint8 (height, width, 3)."""
        image: Tensor = prepared["images"]
        return image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()

    def mistakes(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The cross-entropy of each sample, without class weights. A sample without a label has -inf."""
        labels = batch["labels"]
        chosen = output.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return (-chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()).masked_fill(labels < 0, -math.inf)

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """Precision, recall and F1 by class, and the confusion matrix; with many classes, the most frequent
        confusions."""
        counts, classes = values.get("confusion"), self.task.classes
        if counts is None:
            return ""
        parts = [confusion.by_class(counts, classes)] if len(classes) <= _FEW else []
        return "\n".join([*parts, confusion.confusions(counts, classes)])

    def of_run(self) -> list[str]:
        task, options = self.task, self.task.options
        lines = super().of_run()
        if options.batch_norm == "frozen" and not options.model:
            lines.append(
                "WARNING: task.batch_norm=frozen, but a new model does not have running statistics to normalise with"
            )
        if options.asks_the_images:
            lines.append(self._decided())
        if options.mixup_alpha or task.decided.cutmix_alpha:
            lines.append("mixup and cutmix: train/loss is computed with mixed labels, so it is higher than eval/loss")
        return lines

    def _decided(self) -> str:
        """A line about the values that replace `auto`, and why."""
        task = self.task
        architecture, augment, alpha = task.decided
        values = [] if task.options.model else [f"task.scratch.architecture={architecture}"]
        values += [f"task.augment.crop={augment.crop}", f"task.cutmix_alpha={alpha:g}"]
        what = f"the shorter side of training images has {task.about.side} pixels (median; {SMALL} or less are small)"
        return f"{what}: {', '.join(values)}"

    def program(self, model: nn.Module) -> Program:
        """Probabilities (images, classes) of prepared `images`, uint8 (images, channels, size, size)."""
        task = self.task
        side = task.options.size_for_evaluation(task.about.size)

        def compute(model: nn.Module, images: Tensor) -> Tensor:
            return task.predict(model, {"images": images})

        return program_of_images(compute, model, (task.options.channels, side, side), varies=False)

    def preparation(self) -> dict[str, Any]:
        written = super().preparation()
        del written["side"]  # only for training
        cache = self.task.cache
        return written | {
            "eval_resize": self.task.options.eval_resize,
            "cache_size": cache.shorter_side if cache else None,
        }

    def of_data(self, name: str, data: Any) -> list[str]:
        """Lines about the samples that were read, by class, and the classes without any."""
        classes = self.task.classes
        records = getattr(data, "records", data)
        counts = count_labels(classes, records.labels)
        lines = [f"{name}: {number_of(len(data), 'image')}", f"  by class: {confusion.listed(counts)}"]
        lines += [f"  {note}" for note in member_of(records, "notes", ())]
        cache = getattr(data, "cache", None)
        lines += [] if cache is None else [f"  {cache.summary()}"]
        absent = [label for label, count in counts.items() if not count]
        if absent:
            lines.append(f"  no images of {len(absent)} of {len(classes)} classes ({listed(absent)})")
        return [*lines, self.task.held_back] if name == "training" and self.task.held_back else lines
