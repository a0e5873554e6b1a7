"""Risks from CT volumes: yes/no questions about a patient. Answers may be unknown."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError, did_you_mean
from lockstep.core.task import Metrics
from lockstep_recipes.look.finding import Extent
from lockstep_recipes.tasks.class_weights import OnDevice
from lockstep_recipes.tasks.ct import faults
from lockstep_recipes.tasks.ct.aggregators import make_aggregator
from lockstep_recipes.tasks.ct.backbone import backbone_config, make_backbone
from lockstep_recipes.tasks.ct.features import KeptFeatures, batch_entries
from lockstep_recipes.tasks.ct.heads import make_head
from lockstep_recipes.tasks.ct.interface import Prepared, VolumeRiskTask
from lockstep_recipes.tasks.ct.losses import answer_loss, answer_units, positive_weights, survival_loss, survival_units
from lockstep_recipes.tasks.ct.metrics import AnswerAccuracy, RiskMetrics, update_risk_metrics
from lockstep_recipes.tasks.ct.model import VolumeRiskModel
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.outputs import largest_weights, mean_of_groups
from lockstep_recipes.tasks.ct.presenter import VolumeRiskPresenter
from lockstep_recipes.tasks.ct.volume_labels import horizons
from lockstep_recipes.tasks.ct.volume_table import (
    VolumeSample,
    VolumeTable,
    check_patients_apart,
    has_parts,
    read_volume_table,
)
from lockstep_recipes.tasks.ct.volumes.choice import choose_slices, slice_groups
from lockstep_recipes.tasks.ct.volumes.images import slice_images
from lockstep_recipes.tasks.ct.volumes.windows import windows_of
from lockstep_recipes.tasks.vision.images.normalise import usual_mean_and_std

Batch = dict[str, Any]
Output = dict[str, Tensor]

_PATIENTS = "patients.csv"


@dataclass(frozen=True)
class VolumeRiskMetadata:
    """What the task derives from its data, and keeps with the run."""

    questions: list[str]
    """Names of the questions, in the order of the logits."""
    known: list[int]
    """Training volumes with a known answer to each question."""
    positive: list[int]
    """Training volumes with the answer yes."""
    positive_weights: list[float] | None
    """Factor of the loss of positive labels of each question."""
    mean: list[float]
    """Mean of each channel, from 0 to 1."""
    std: list[float]
    """Standard deviation of each channel, from 0 to 1."""


@final
class VolumeRisk(VolumeRiskTask):
    """Each volume has yes/no labels, and NaN for unknown labels.

    The loss is a sum over known labels, or over volumes with a known label. A batch is a dict:

    | key | | |
    |---|---|---|
    | `slices` | uint8 (images, channels, size, size) | slices of all volumes one after another |
    | `counts` | int64 (groups) | number of slices of each group; a group is a volume or some of its slices |
    | `longest` | int | the largest of `counts` |
    | `positions` | float32 (slices) | millimetres along the axis |
    | `places` | int64 (slices) | numbers of the slices in their volumes |
    | `labels` | float32 (volumes, questions) | 1, 0 or NaN |
    | `index` | int64 (volumes) | indices of the samples in their table |
    | `groups` | int64 (volumes) | number of groups of each volume, only with `eval_slices: all` |

    If features are cached, `features.batch_entries` adds its keys, and `slices` contains only the remaining slices.

    An output is a dict of `risks`: (volumes, questions), probabilities; and, for the `max_slices` slices with the
    largest attention weights, from feet to head: `attention`: (volumes, `max_slices`), whose sum over all slices of a
    volume is 1; `slices`: int64, their numbers in the volume, -1 for entries without a slice; `positions`: float32,
    millimetres.

    Args:
        train, eval: tables of volumes: see `tasks.ct.volume_table.read_volume_table`. Without `eval`, the evaluation
            rows of `train` are used, if the table or `fold` determines them.
        fold: `2/5`: the second of five folds of the patients of `train` is for evaluation.
    """

    presenter = VolumeRiskPresenter
    finders = faults.FINDERS
    kept = "volume_risk.json"
    about_type = VolumeRiskMetadata

    def __init__(
        self, options: VolumeRiskOptions, train: str, eval: str | None = None, fold: str | None = None
    ) -> None:
        if eval is not None and fold is not None:
            remedy = "remove data.eval or data.fold"
            what = "both data.fold and data.eval set the evaluation data"
            raise UsageError(what, where="data.fold", remedy=remedy)
        super().__init__(options, train, eval or (train if fold is not None or has_parts(train) else None))
        self.fold = fold
        self.frozen_epochs = {"backbone.*": options.frozen_epochs} if options.frozen_epochs else {}
        self.windows = windows_of(options.windows)
        self._features = self._kept_features()  # before loader workers are forked: they share its memory

    def to_keep(self) -> VolumeRiskMetadata:
        """The questions and the weights of positive labels.

        Raises:
            DataError: a table cannot be used, or a patient is in both training and evaluation data.
        """
        if self._eval is not None:
            check_patients_apart(self._train, self._eval)
        found: VolumeRiskMetadata = self.about
        return found

    def save(self, folder: Path) -> None:
        """Write the backbone's config, and the patients of the training and the evaluation data."""
        backbone_config(self.options).save_pretrained(folder)
        self._write_patients(folder / _PATIENTS)

    def _write_patients(self, path: Path) -> None:
        """Write a line for each patient with the split of the patient: `train` or `eval`."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["patient", "part"])
            for part, data in (("train", self._train), ("eval", self._eval)):
                writer.writerows([patient, part] for patient in sorted(set(data.patients if data is not None else ())))

    def data_to_look_at(self, extent: Extent) -> list[faults.VolumeSplit]:
        """The volumes of both splits for the finders."""
        evaluation = self.eval_data()
        splits = [faults.VolumeSplit("training", self.train_data(), extent)]
        return splits if evaluation is None else [*splits, faults.VolumeSplit("evaluation", evaluation, extent)]

    def learn(self) -> VolumeRiskMetadata:
        data, options = self.read(self.train_source, "train", None), self.options
        labels = torch.from_numpy(data.labels)
        usual = usual_mean_and_std(len(self.windows))
        return VolumeRiskMetadata(
            questions=data.questions,
            known=(~labels.isnan()).sum(dim=0).tolist(),
            positive=(labels == 1).sum(dim=0).tolist(),
            positive_weights=_positive_weights(options, data.questions, labels),
            mean=options.mean or usual[0],
            std=options.std or usual[1],
        )

    @property
    def names(self) -> list[str]:
        names: list[str] = self.about.questions
        return names

    questions = names

    @cached_property
    def outcomes(self) -> list[list[int]]:
        """The questions of each event by their numbers, from the nearest horizon to the farthest. A question without a
        time is a separate event."""
        timed = [[place for _, place in times] for times in horizons(self.questions).values()]
        known = {place for group in timed for place in group}
        return [*timed, *([place] for place in range(len(self.questions)) if place not in known)]

    # ---- data

    def read(self, source: str, split: Literal["train", "eval"], names: list[str] | None) -> VolumeTable:
        return read_volume_table(source, split, self.options, questions=names, fold=self.fold)

    # ---- the model

    def model(self) -> nn.Module:
        options, about = self.options, self.about
        backbone, self.new_weights = make_backbone(options, self.folder, trained=self._trained)
        aggregator: Any = make_aggregator(options.aggregator, backbone.width)
        head = make_head(options.head, aggregator.width, len(about.questions), self.outcomes)
        normalisation: dict[str, Any] = {"mean": about.mean, "std": about.std}
        return VolumeRiskModel(backbone, aggregator, head, slices_per_chunk=options.slices_per_chunk, **normalisation)

    def tensor_plan(self) -> dict[str, str]:
        """The tensor-parallel plan of a vision transformer of transformers: attention and feed-forward layers are
        sharded."""
        return {
            "backbone.network.*.attention.[qkv]_proj": "colwise",
            "backbone.network.*.attention.o_proj": "rowwise",
            "backbone.network.*.mlp.fc1": "colwise",
            "backbone.network.*.mlp.fc2": "rowwise",
        }

    def _kept_features(self) -> KeptFeatures | None:
        """The cached features of slices."""
        options = self.options
        if not options.frozen_epochs or not options.keep_features:
            return None
        return KeptFeatures(repr((self.windows, options.image_size, options.keep_shape)))

    # ---- from a volume to a batch

    def prepare(self, sample: VolumeSample, epoch: int, training: bool) -> Prepared:
        """The slices of a sample. In training they are chosen at random, and augmented from the epoch
        `frozen_epochs`."""
        options, count = self.options, len(sample.slices)
        if training:
            groups = [choose_slices(count, options.max_slices, how=options.train_slices)]
        elif options.eval_slices == "even":
            groups = [choose_slices(count, options.max_slices, how="even")]
        else:
            groups = slice_groups(count, options.max_slices, how=options.train_slices)
        places = np.concatenate(groups)
        is_frozen = training and epoch < options.frozen_epochs
        rows = self._features.look_up(sample.key, places.tolist()) if is_frozen and self._features else None
        return Prepared(
            pictures=self._pictures(
                sample, places if rows is None else np.array(rows.missing, np.int64), changes=training and not is_frozen
            ),
            counts=[len(group) for group in groups],
            places=torch.from_numpy(places),
            positions=torch.from_numpy(sample.positions[places]),
            labels=torch.tensor(sample.labels),
            index=sample.index,
            rows=rows,
        )

    def _pictures(self, sample: VolumeSample, places: Any, *, changes: bool) -> Tensor:
        """The slices at `places`, uint8 (slices, channels, size, size)."""
        options = self.options
        if not len(places):
            size = options.image_size
            return torch.empty(0, len(self.windows), size, size, dtype=torch.uint8)
        augment = options.augment if changes else None
        return slice_images(
            sample.slices[places], self.windows, options.image_size, augment=augment, keep_shape=options.keep_shape
        )

    def collate(self, samples: list[Prepared]) -> Batch:
        counts = [count for sample in samples for count in sample.counts]
        batch: Batch = {
            "slices": torch.cat([sample.pictures for sample in samples]),
            "counts": torch.tensor(counts),
            "longest": max(counts),
            "positions": torch.cat([sample.positions for sample in samples]),
            "places": torch.cat([sample.places for sample in samples]),
            "labels": torch.stack([sample.labels for sample in samples]),
            "index": torch.tensor([sample.index for sample in samples]),
        }
        rows = [sample.rows for sample in samples if sample.rows is not None]
        if rows:
            batch |= batch_entries(rows)
        if any(len(sample.counts) > 1 for sample in samples):
            batch["groups"] = torch.tensor([len(sample.counts) for sample in samples])
        return batch

    # ---- from a batch to a loss

    @cached_property
    def _positive_weights(self) -> OnDevice:
        weights = self.about.positive_weights
        return OnDevice(None if weights is None else torch.tensor(weights))

    def weight(self, batch: Batch) -> Tensor:
        """The number of known labels, of events with a known label, or of volumes with a known label."""
        options = self.options
        if options.loss == "survival":
            return survival_units(batch["labels"], self.outcomes, options.reduction)
        return answer_units(batch["labels"], options.reduction)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Output]:
        logits, output = self._forward(model, batch)
        options, labels = self.options, batch["labels"]
        if options.loss == "survival":
            loss = survival_loss(logits, labels, self.outcomes, reduction=options.reduction)
        else:
            weights = self._positive_weights.like(logits)
            loss = answer_loss(logits, labels, reduction=options.reduction, positive_weight=weights)
        return loss, output

    def predict(self, model: nn.Module, batch: Batch) -> Output:
        """The risks of each volume, and the slices with the largest weights."""
        return self._forward(model, batch)[1]

    def _forward(self, model: Any, batch: Batch) -> tuple[Tensor, Output]:
        """Logits (volumes, questions), and the output."""
        features = model.slice_features(batch)
        if self._features is not None and model.training:
            self._features.update(model, batch, features)
        logits, attention = model(batch, features)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        counts = batch["counts"]
        if "groups" in batch:
            logits, attention, counts = mean_of_groups(logits, attention, counts, batch["groups"])
        output = {"risks": logits.detach().sigmoid()}
        if not model.training:
            output |= largest_weights(batch, attention.detach().float(), counts, self.options.max_slices)
        return logits, output

    # ---- metrics

    def metrics(self) -> Metrics:
        """Scores of each question and event: see `metrics.RiskMetrics` and `metrics.AnswerAccuracy`.

        The training log has only the accuracy, because all other scores need all risks at once.
        """
        options = self.options
        metric = RiskMetrics(
            self.questions,
            outcomes=horizons(self.questions),
            patients=None if self._eval is None else self._eval.patients,
            threshold=options.threshold,
            resamples=options.resamples,
        )
        accuracy = AnswerAccuracy(self.questions, threshold=options.threshold)
        return Metrics({"risks": metric, "accuracy": accuracy}, update_risk_metrics)


def _positive_weights(options: VolumeRiskOptions, questions: Sequence[str], labels: Tensor) -> list[float] | None:
    """The factor of each question, from the options.

    Raises:
        UsageError: a question does not exist.
    """
    wanted = options.positive_weights
    if wanted is None:
        return None
    if isinstance(wanted, str):
        found: list[float] = positive_weights(labels).tolist()
        return found
    unknown = [name for name in wanted if name not in questions]
    if unknown:
        remedy = f"{did_you_mean(unknown[0], questions)}There are: {', '.join(questions)}"
        raise UsageError(f"there is no question {unknown[0]!r}", where="task.positive_weights", remedy=remedy)
    return [float(wanted.get(name, 1.0)) for name in questions]
