"""Base class for the texts and files of the three image tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from lockstep_recipes.look.presenter import DataPresenter
from lockstep_recipes.tasks.readers import duplicates
from lockstep_recipes.tasks.vision.image_task import ImageTask
from lockstep_recipes.tasks.vision.images.decode import WHITE
from lockstep_recipes.tasks.vision.readers.class_table import listed


class ImagePresenter(DataPresenter):
    """The common part: the head of the log, and the JSON file of an export."""

    task: ImageTask
    square_evaluations = True
    """True if evaluation images have the size of `size_for_evaluation`, which the log then reports."""

    def class_names(self) -> Sequence[str]:
        return self.task.classes

    def epoch_header(self, epoch: int) -> str:
        """The size of training images in an epoch, counted from 0."""
        return f"image size {self.task.options.size_at(epoch, self.task.about.size)}"

    # ---- the head of the log

    def of_run(self) -> list[str]:
        """The data, the classes, image sizes, how evaluations prepare images, and new weights."""
        task, options = self.task, self.task.options
        training, evaluation = task.train_data(), task.eval_data()
        lines = self.of_data("training", training)
        lines += [] if evaluation is None else self.of_data("evaluation", evaluation)
        lines += duplicates.of_images(self.samples(training), self.samples(evaluation))
        lines += [*self.of_classes(), self._sizes(), *self.of_evaluation()]
        if task.new_weights:
            lines.append(f"not in {options.model}, so initialised: {listed(task.new_weights)}")
        return lines

    def of_data(self, name: str, data: Any) -> list[str]:
        """Lines about the training data or the evaluation data."""
        raise NotImplementedError

    def samples(self, data: Any) -> duplicates.SplitImages | None:
        """The images that are checked for duplicates."""
        return duplicates.samples_of(data)

    def of_classes(self) -> list[str]:
        """Lines about the classes."""
        return duplicates.of_names(self.task.classes)

    def of_evaluation(self) -> list[str]:
        """Lines about how evaluations prepare images."""
        return []

    def _sizes(self) -> str:
        options, about = self.task.options, self.task.about
        first, last = options.size_at(0, about.size), options.size_at(10**9, about.size)
        grows = f"{first}" if first == last else f"{first} in the first epoch, {last} in the last"
        if self.square_evaluations:
            grows += f", evaluation {options.size_for_evaluation(about.size)}"
        mean, std = (", ".join(f"{value:.4g}" for value in part) for part in (about.mean, about.std))
        grey = "" if about.levels == WHITE else f"; {about.levels:,} is white in files of 16 bits (task.levels)"
        return f"images: {grows} pixels; mean {mean}, standard deviation {std}{grey}"

    # ---- an export

    def preparation(self) -> dict[str, Any]:
        """The classes, and how evaluations prepare images: the content of the JSON file of an export."""
        about, options = self.task.about, self.task.options
        return asdict(about) | {
            "size": options.size_for_evaluation(about.size),
            "interpolation": options.augment.interpolation,
            "channels": options.channels,
            "batch_norm": options.batch_norm,
        }

    def export(self, model: nn.Module, folder: Path) -> list[str]:
        """Write a JSON file with `preparation`. For a transformers model, also write what `transformers.pipeline`
        needs: its config and the config of an image processor."""
        written = self.preparation()
        (folder / self.task.kept).write_text(json.dumps(written, indent=1))
        return self.task.models.export(model, written, folder)
