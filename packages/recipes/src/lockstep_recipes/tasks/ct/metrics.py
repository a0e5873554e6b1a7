"""Metrics of risks, by question and over horizons, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.ct import scores

FALSE_POSITIVE_RATES = np.linspace(0, 1, 101)
"""The false-positive rates at which `roc` is evaluated."""
_OF_QUESTION = ("auc", "auc_low", "auc_high", "average_precision", "brier", "sensitivity", "specificity")
FALLING = "falling_risks"
"""The number of patients whose risk of an event decreases from a horizon to a later one."""
_LEAST_FALL = 1e-6  # smaller differences are rounding errors
_LEVEL, _BINS = 0.95, 10  # level of the intervals, bins of the calibration
_OF_OUTCOME = ("concordance", "concordance_low", "concordance_high")


class RiskMetrics(Metric):
    """Scores of predicted risks over all samples with known labels.

    Each rank keeps the risks and labels of its samples. Rank 0 gets those of all ranks, and computes the scores in
    float64 and in the order of the samples. So the scores do not depend on the number of ranks.

    Undefined scores are left out: the AUC and the average precision of a question with labels of only one class, or
    with a risk that is not finite.

    Args:
        questions: names of the questions.
        outcomes: by name of an event, its horizons in years with the indices of their questions, ascending, as
            `tasks.ct.volume_table.horizons` gives them. Events with a single horizon have no concordance index.
        patients: the patient of each evaluation sample, by the index of the sample. The bootstrap draws patients. None:
            each sample counts as its own patient.
        threshold: the risk threshold for sensitivity and specificity.
        resamples: number of bootstrap resamples. 0: no intervals.
        seed: the seed of the bootstrap.
    """

    full_state_update = False
    risks: list[Tensor]
    labels: list[Tensor]
    indices: list[Tensor]

    def __init__(
        self,
        questions: Sequence[str],
        *,
        outcomes: Mapping[str, Sequence[tuple[float, int]]] | None = None,
        patients: Sequence[str] | None = None,
        threshold: float = 0.5,
        resamples: int = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.questions, self.patients = list(questions), patients
        self.outcomes = {name: places for name, places in (outcomes or {}).items() if len(places) > 1}
        self.threshold, self.resamples, self.seed = threshold, resamples, seed
        for name in ("risks", "labels", "indices"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @property
    def possible_results(self) -> list[str]:
        """Names of all numbers that `compute` may return. With few samples, some are missing."""
        by_question = [f"{name}/{question}" for name in _OF_QUESTION for question in self.questions]
        falling = [FALLING] if self.outcomes else []
        by_outcome = [f"{name}/{outcome}" for name in _OF_OUTCOME for outcome in self.outcomes]
        return ["auc", *by_question, *by_outcome, *falling]

    def update(self, risks: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Add the samples of a batch.

        Args:
            risks: (samples, questions): probabilities.
            labels: (samples, questions): 1, 0, or NaN for unknown.
            indices: int64 (samples): the indices of the samples in the evaluation data.
        """
        self.risks.append(risks.detach().cpu().double())
        self.labels.append(labels.detach().cpu().float())
        self.indices.append(indices.detach().cpu())

    def compute(self) -> dict[str, Tensor]:
        """The scores.

        Returns:
            numbers `SCORE/QUESTION`, with the scores `auc`, `auc_low`, `auc_high` (the bootstrap interval),
            `average_precision`, `brier`, `sensitivity`, `specificity`; `auc`, the mean over the questions with an AUC;
            `concordance/EVENT`, `concordance_low/EVENT`, `concordance_high/EVENT`: Harrell's index, where the risk of a
            sample is its mean risk over the horizons; `falling_risks`: the number of patients whose risk of an event
            decreases from a horizon to a later one, if events have several horizons. Also tensors that are not logged
            as numbers, with NaN for undefined values: `label_counts` (questions, 3): known, positive and negative
            labels; `calibration` (questions, bins, 3): see `scores.calibration`; `roc` (questions, 101): the
            sensitivity at false-positive rates 0, 0.01, ... 1; `risks_not_finite` (questions, 1): number of such risks
            with known labels; `patients` (1, 2): the number of patients, and again `falling_risks`.

        Raises:
            DataError: a sample was counted twice.
        """
        indices = _joined(self.indices).astype(np.int64)
        order = np.argsort(indices, kind="stable")
        indices = indices[order]
        if (indices[1:] == indices[:-1]).any():
            twice = int(indices[1:][indices[1:] == indices[:-1]][0])
            remedy = "set `index` of a batch to the indices of its samples in the evaluation data"
            raise DataError(f"evaluation sample {twice} was counted twice", where="RiskMetrics", remedy=remedy)
        count = len(self.questions)
        risks, labels = (_joined(part).reshape(-1, count)[order] for part in (self.risks, self.labels))
        numbers, tables = self._by_question(risks, labels)
        groups = self._groups(indices)
        numbers |= self._with_intervals(risks, labels, groups)
        if self.outcomes:
            numbers[FALLING] = float(len(np.unique(groups[self._falls(risks)])))
        tables["patients"] = np.array([[len(np.unique(groups)), numbers.get(FALLING, 0.0)]])
        known = {name: value for name, value in numbers.items() if np.isfinite(value)}
        areas = [value for name, value in known.items() if name.startswith("auc/")]
        if areas:
            known = {"auc": float(np.mean(areas)), **known}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()} | {
            name: torch.from_numpy(table) for name, table in tables.items()
        }

    def _groups(self, indices: Array) -> Array:
        """The number of the patient of each row."""
        if self.patients is None:
            return np.arange(len(indices))
        patients = np.asarray(self.patients)[indices]
        return np.unique(patients, return_inverse=True)[1] if len(patients) else np.zeros(0, np.int64)

    def _falls(self, risks: Array) -> Array:
        """True for rows in which a risk decreases from a horizon to the next, whatever the labels: (rows,) bool."""
        falls = np.zeros(len(risks), dtype=bool)
        for places in self.outcomes.values():
            risk = risks[:, [place for _, place in places]]
            falls |= (np.maximum.accumulate(risk, axis=1) - risk > _LEAST_FALL).any(axis=1)
        return falls

    def _by_question(self, risks: Array, labels: Array) -> tuple[dict[str, float], dict[str, Array]]:
        numbers: dict[str, float] = {}
        counts, bad, tables, curves = [], [], [], []
        for place, question in enumerate(self.questions):
            risk, label = _known(risks, labels, place)
            counts.append([len(label), (label == 1).sum(), (label == 0).sum()])
            bad.append([(~np.isfinite(risk)).sum()])
            if bad[-1][0]:
                risk, label = risk[:0], label[:0]
            sensitivity, specificity = scores.sensitivity_and_specificity(risk, label, self.threshold)
            numbers |= {
                f"average_precision/{question}": scores.average_precision(risk, label),
                f"brier/{question}": scores.brier(risk, label),
                f"sensitivity/{question}": sensitivity,
                f"specificity/{question}": specificity,
            }
            tables.append(scores.calibration(risk, label, _BINS))
            curves.append(scores.roc(risk, label, FALSE_POSITIVE_RATES))
        arrays = {"label_counts": counts, "calibration": tables, "roc": curves, "risks_not_finite": bad}
        return numbers, {name: np.asarray(values, dtype=np.float64) for name, values in arrays.items()}

    def _with_intervals(self, risks: Array, labels: Array, groups: Array) -> dict[str, float]:
        """The AUC of each question and the concordance of each outcome, with their intervals."""
        found: dict[tuple[str, str], scores.Score] = {}
        for place, question in enumerate(self.questions):
            rows = ~np.isnan(labels[:, place])
            if np.isfinite(risks[rows, place]).all():
                found["auc", question] = _of_rows(scores.auc, rows, risks[rows, place], labels[rows, place])
        for outcome, places in self.outcomes.items():
            years, columns = (list(part) for part in zip(*places, strict=True))
            times, events = scores.event_times(labels[:, columns], years)
            rows, risk = np.isfinite(times), risks[:, columns].mean(axis=1)
            if np.isfinite(risk[rows]).all():
                found["concordance", outcome] = _of_rows(
                    scores.concordance, rows, risk[rows], times[rows], events[rows]
                )
        points = {name: float(score(None)[0]) for name, score in found.items()}
        defined = {name: score for name, score in found.items() if np.isfinite(points[name])}
        limits = scores.intervals(list(defined.values()), groups, count=self.resamples, seed=self.seed, level=_LEVEL)
        numbers = {f"{score}/{name}": points[score, name] for score, name in found}
        for (score, name), (low, high) in zip(defined, limits, strict=True):
            numbers |= {f"{score}_low/{name}": low, f"{score}_high/{name}": high}
        return numbers


class AnswerAccuracy(Metric):
    """The fraction of known labels that are predicted correctly: the risk is at least `threshold` exactly if the event
    occurs. A risk that is not finite counts as wrong.

    `compute` returns `accuracy` over all known labels, and `accuracy/QUESTION` of each question with a known label.
    """

    full_state_update = False
    right: Tensor
    known: Tensor

    def __init__(self, questions: Sequence[str], *, threshold: float = 0.5) -> None:
        super().__init__()
        self.questions, self.threshold = list(questions), threshold
        for name in ("right", "known"):
            self.add_state(name, torch.zeros(len(self.questions), dtype=torch.int64), dist_reduce_fx="sum")

    @property
    def possible_results(self) -> list[str]:
        """Names of all numbers that `compute` may return."""
        return ["accuracy", *(f"accuracy/{question}" for question in self.questions)]

    def update(self, risks: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Count the samples of a batch. For the arguments see `RiskMetrics.update`."""
        known = ~labels.isnan()
        right = ((risks >= self.threshold) == (labels > 0.5)) & risks.isfinite()
        self.right += (right & known).sum(dim=0)
        self.known += known.sum(dim=0)

    def compute(self) -> dict[str, Tensor]:
        right, known = self.right.double(), self.known.double()
        seen = {name: place for place, name in enumerate(self.questions) if known[place]}
        if not seen:
            return {}
        by_question = {f"accuracy/{name}": right[place] / known[place] for name, place in seen.items()}
        return {"accuracy": right.sum() / known.sum(), **by_question}


def update_risk_metrics(metrics: MetricCollection, output: Mapping[str, Any], batch: Mapping[str, Tensor]) -> None:
    """Update the metrics with a batch: `risks` of the output, and `labels` and `index` of the batch."""
    metrics.update(output["risks"], batch["labels"], batch["index"])


def _of_rows(score: Any, rows: Array, *columns: Array) -> scores.Score:
    """A score of some samples, as a function of the weights of all samples."""
    return lambda weights: score(*columns, None if weights is None else weights[:, rows])


def _known(risks: Array, labels: Array, place: int) -> tuple[Array, Array]:
    rows = ~np.isnan(labels[:, place])
    return risks[rows, place], labels[rows, place].astype(np.float64)


def _joined(parts: Any) -> Array:
    joined: Array = torch.cat(parts).numpy() if isinstance(parts, list) and parts else np.asarray(parts)
    return joined
