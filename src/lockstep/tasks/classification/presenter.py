"""How image classification shows its data, predictions and results to people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.sources import doubles
from lockstep.sources.image_records import ImageRecords, unlabelled_pictures
from lockstep.sources.labels import count_labels
from lockstep.tasks import confusion
from lockstep.tasks.classification.models import Preparation, models_for
from lockstep.tasks.classification.options import SMALL
from lockstep.tasks.presenter import Presenter
from lockstep.tasks.program import Program, program_of_images

if TYPE_CHECKING:
    from lockstep.tasks.classification.task import Classification, Sample

_FEW = 30  # classes up to which results are listed by class
_SHOWN = 8


class ClassificationPresenter(Presenter):
    """Shows the most probable classes, and results by class. INPUT arguments are pictures and folders of pictures."""

    task: Classification

    def inputs(self, arguments: Sequence[str]) -> ImageRecords:
        """The pictures that the arguments name: files, folders, patterns and shards."""
        return unlabelled_pictures(arguments)

    def describe(self, output: Tensor) -> dict[str, Any]:
        """The most probable class, its probability, and with `top_k` above 1 the most probable classes by name."""
        classes = self.task.classes
        values, places = output.topk(min(self.task.options.top_k, len(classes)))
        pairs = zip(places.tolist(), values.tolist(), strict=True)
        top = {classes[place]: round(value, 4) for place, value in pairs}
        best = next(iter(top))
        described: dict[str, Any] = {"prediction": best, "probability": top[best]}
        return described | ({"top": top} if len(top) > 1 else {})

    def truth(self, sample: Sample) -> str | None:
        label = int(sample[1])
        return self.task.classes[label] if label >= 0 else None

    def picture(self, sample: Sample, prepared: Mapping[str, Any], output: Tensor | None) -> Any:
        """The image of a prepared sample as people see it: uint8 (height, width, 3)."""
        image: Tensor = prepared["images"]
        return image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()

    def mistakes(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The cross-entropy of each sample, without class weights. A sample without a label has -inf."""
        labels = batch["labels"]
        chosen = output.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return (-chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()).masked_fill(labels < 0, -math.inf)

    def class_names(self) -> Sequence[str]:
        return self.task.classes

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """Precision, recall and F1 by class, and the confusion matrix; of many classes the most frequent confusions."""
        counts, classes = values.get("confusion"), self.task.classes
        if counts is None:
            return ""
        parts = [confusion.by_class(counts, classes)] if len(classes) <= _FEW else []
        return "\n".join([*parts, confusion.confusions(counts, classes)])

    def epoch_header(self, epoch: int) -> str:
        """The size of training pictures in an epoch, counted from 0."""
        return f"image size {self.task.options.size_at(epoch, self.task.about.size)}"

    def log_header(self) -> list[str]:
        """The data by class, the sizes of pictures, the normalisation, and the weights that are new."""
        task, options = self.task, self.task.options
        lines = _of_data("training", task.train_data(), task.classes)
        lines += [task.held_back] if task.held_back else []
        evaluation = task.eval_data()
        if evaluation is not None:
            lines += _of_data("evaluation", evaluation, task.classes)
        lines += doubles.of_pictures(doubles.samples_of(task.train_data()), doubles.samples_of(evaluation))
        lines += doubles.of_names(task.classes)
        lines += [self._sizes(), *self._of_model()]
        if options.asks_the_pictures:
            lines.append(self._decided())
        if options.mixup_alpha or task.decided.cutmix_alpha:
            lines.append("mixup and cutmix: train/loss is that of mixed labels, so it lies above eval/loss")
        return lines

    def _sizes(self) -> str:
        options, about = self.task.options, self.task.about
        first, last = options.size_at(0, about.size), options.size_at(10**9, about.size)
        grows = f"{first}" if first == last else f"{first} in the first epoch, {last} in the last"
        numbers = [", ".join(f"{value:.4g}" for value in part) for part in (about.mean, about.std)]
        evaluation = options.size_for_evaluation(about.size)
        return f"images: {grows}, evaluation {evaluation} pixels; mean {numbers[0]}, standard deviation {numbers[1]}"

    def _decided(self) -> str:
        """What `auto` became, and why."""
        task = self.task
        architecture, augment, alpha = task.decided
        values = [] if task.options.model else [f"task.scratch.architecture={architecture}"]
        values += [f"task.augment.crop={augment.crop}", f"task.cutmix_alpha={alpha:g}"]
        what = f"the shorter side of training pictures has {task.about.side} pixels (median; {SMALL} or less are small)"
        return f"{what}: {', '.join(values)}"

    def _of_model(self) -> list[str]:
        options, new = self.task.options, self.task.new_weights
        lines = []
        if new:
            shown = ", ".join(new[:_SHOWN]) + (", ..." if len(new) > _SHOWN else "")
            lines.append(f"not in {options.model}, so new: {shown}")
        if options.batch_norm == "frozen" and not options.model:
            lines.append("WARNING: task.batch_norm=frozen, but a new model has no running statistics to normalise by")
        return lines

    def program(self, model: nn.Module) -> Program:
        """Probabilities (pictures, classes) of prepared `images`, uint8 (pictures, channels, size, size)."""
        task = self.task
        side = task.options.size_for_evaluation(task.about.size)

        def compute(model: nn.Module, images: Tensor) -> Tensor:
            return task.predict(model, {"images": images})

        return program_of_images(compute, model, (task.options.channels, side, side), varies=False)

    def export(self, model: nn.Module, folder: Path) -> list[str]:
        """Write `classification.json` (classes, and how evaluations prepare pictures), and what `transformers.pipeline`
        needs if the model is of transformers: its config and the config of an image processor."""
        task = self.task
        about, options = task.about, task.options
        written = asdict(about) | {
            "size": options.size_for_evaluation(about.size),
            "eval_resize": options.eval_resize,
            "interpolation": options.augment.interpolation,
            "channels": options.channels,
            "cache_size": task.cache.shorter_side if task.cache else None,
            "batch_norm": options.batch_norm,
        }
        del written["side"]  # it is for training only
        (folder / "classification.json").write_text(json.dumps(written, indent=1))
        preparation = Preparation(
            size=options.size_for_evaluation(about.size),
            resize_to=options.eval_resize,
            mean=about.mean,
            std=about.std,
            interpolation=options.augment.interpolation,
        )
        return models_for(options, task.folder).export(model, preparation, folder)


def _of_data(name: str, data: Any, classes: Sequence[str]) -> list[str]:
    """Lines about the samples that were read, by class, and the classes without any."""
    records = getattr(data, "records", data)
    counts = count_labels(classes, records.labels)
    lines = [f"{name}: {len(data):,} images", f"  by class: {confusion.listed(counts)}"]
    lines += [f"  {note}" for note in getattr(records, "notes", ())]
    cache = getattr(data, "cache", None)
    lines += [] if cache is None else [f"  {cache.summary()}"]
    absent = [label for label, count in counts.items() if not count]
    if absent:
        shown = ", ".join(absent[:_SHOWN]) + (", ..." if len(absent) > _SHOWN else "")
        lines.append(f"  no image of {len(absent)} of {len(classes)} classes ({shown})")
    return lines
