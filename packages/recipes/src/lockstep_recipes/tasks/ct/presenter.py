"""Texts, figures and files that present risks from CT volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.errors import number_of
from lockstep.core.program import Program
from lockstep.drawing import drawing
from lockstep_recipes.look.presenter import DataPresenter
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.ct import drawings
from lockstep_recipes.tasks.ct.export import risks_of_volume, write_export
from lockstep_recipes.tasks.ct.interface import Prepared, VolumeRiskTask
from lockstep_recipes.tasks.ct.report import risk_report
from lockstep_recipes.tasks.ct.volume_inputs import read_volume_inputs
from lockstep_recipes.tasks.ct.volume_table import VolumeSample, VolumeTable, horizons
from lockstep_recipes.tasks.ct.volumes.windows import windowed
from lockstep_recipes.tasks.vision.readers.class_table import listed

_DIGITS = 4
_MATTERED = 3  # slices that rows and texts name

Output = Mapping[str, Tensor]


class VolumeRiskPresenter(DataPresenter):
    """Presents the slices of a volume with their attention weights, its risks over the horizons, and scores by
    question.

    INPUT arguments are files and folders of volumes, folders of DICOM series, and tables. Images show the first
    window of `task.windows`.
    """

    task: VolumeRiskTask
    picture_side = 1100

    def inputs(self, arguments: Sequence[str]) -> VolumeTable:
        """The volumes that the arguments name: see `read_volume_inputs`."""
        return read_volume_inputs(arguments, self.task.questions, self.task.options)

    # ---- one volume

    def describe(self, output: Output) -> dict[str, Any]:
        """`risks` by question, and `slices`: the three slices with the largest weights, the largest first."""
        slices = [
            {"slice": number, "mm": round(position, 1), "attention": round(weight, _DIGITS)}
            for number, position, weight in _mattered(output)
        ]
        return {"risks": self._risks(output), "slices": slices}

    def _risks(self, output: Output) -> dict[str, float]:
        risks = output["risks"].tolist()
        return {question: round(risk, _DIGITS) for question, risk in zip(self.task.questions, risks, strict=True)}

    def truth(self, sample: VolumeSample) -> dict[str, int] | None:
        """The known labels by question."""
        labels = zip(self.task.questions, sample.labels.tolist(), strict=True)
        return {question: int(label) for question, label in labels if label == label} or None

    def rows(self, sample: VolumeSample, output: Output) -> list[dict[str, Any]]:
        """A row: `patient`; `risk/QUESTION` for each question; and for each of the three slices with the largest
        weights `slice_1` (its number, from 0 at the feet), `slice_1_mm` (millimetres from the first slice) and
        `slice_1_attention`."""
        row: dict[str, Any] = {"patient": sample.patient}
        row |= {
            f"risk/{question}": risk
            for question, risk in zip(self.task.questions, output["risks"].tolist(), strict=True)
        }
        for place, (number, position, weight) in enumerate(_mattered(output), start=1):
            row |= {f"slice_{place}": number, f"slice_{place}_mm": position, f"slice_{place}_attention": weight}
        return [row]

    def files(self, sample: VolumeSample, output: Output) -> Mapping[str, bytes]:
        """The figure of the slices with their weights, and of the risks."""
        return {"risks/*.png": drawing.png(self._drawn(sample, output, labels=None))}

    def picture(self, sample: VolumeSample, prepared: Prepared, output: Output | None) -> drawing.ImageArray:
        """The slices with their weights, and below them the risks over the horizons. For a training sample: the slices
        as the model sees them."""
        if output is None:
            places = np.linspace(0, len(prepared.pictures) - 1, min(len(prepared.pictures), drawings.MOST_SLICES))
            chosen = places.round().astype(np.int64)
            return drawings.strip(prepared.pictures[chosen, 0].numpy(), prepared.positions[chosen].numpy())
        return self._drawn(sample, output, labels=sample.labels)

    def _drawn(self, sample: VolumeSample, output: Output, labels: Array | None) -> drawing.ImageArray:
        """Slices with weights are drawn from the volume itself, because an output contains only their numbers."""
        real = output["slices"] >= 0
        numbers, positions, weights = (output[name][real].numpy() for name in ("slices", "positions", "attention"))
        kept = drawings.most_attended(weights)
        pictures = windowed(sample.slices[numbers[kept]], self.task.windows[:1])[..., 0]
        strip = drawings.strip(pictures, positions[kept], weights[kept])
        curve = drawings.risk_curve(output["risks"].numpy(), labels, horizons(self.task.questions))
        return strip if curve is None else drawing.stacked([strip, curve])

    def caption(self, sample: VolumeSample, prepared: Prepared, output: Output | None) -> str:
        """The name of the volume. For an evaluation sample, also risks and known answers by event."""
        lines = [f"{sample.patient}: {sample.name}"]
        if output is not None:
            risks, questions = output["risks"].tolist(), self.task.questions
            answers = {0.0: "no", 1.0: "yes"}
            for group in self.task.outcomes:
                parts = [
                    f"{questions[place]} {risks[place]:.2f} ({answers.get(float(sample.labels[place]), 'unknown')})"
                    for place in group
                ]
                lines.append(", ".join(parts))
        return "\n".join(lines)

    def mistakes(self, output: Output, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean binary cross-entropy over the known labels of each volume; -inf for a volume without any."""
        labels = batch["labels"]
        known, risks = ~labels.isnan(), output["risks"].float()
        losses = torch.nn.functional.binary_cross_entropy(risks, labels.nan_to_num().float(), reduction="none")
        means = losses.masked_fill(~known, 0).sum(dim=1) / known.sum(dim=1).clamp_min(1)
        return means.masked_fill(~known.any(dim=1), -torch.inf)

    # ---- an evaluation and a run

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """Scores by question, and what is undefined and why: see `report.risk_report`."""
        return risk_report(values, self.task.questions, threshold=self.task.options.threshold)

    def pictures(self, values: Mapping[str, Tensor]) -> Mapping[str, drawing.ImageArray]:
        """`roc` and `calibration`, with a curve for each question and a diagram for each event."""
        if "roc" not in values:
            return {}
        questions = self.task.questions
        outcomes = horizons(questions)
        areas = {name: float(values[f"auc/{name}"]) for name in questions if f"auc/{name}" in values}
        drawn = {
            "roc": drawings.roc_curves(values["roc"].numpy(), areas, questions, outcomes),
            "calibration": drawings.calibration_curves(values["calibration"].numpy(), questions, outcomes),
        }
        return {name: picture for name, picture in drawn.items() if picture is not None}

    def of_run(self) -> list[str]:
        """The data, known labels by question, windows, and the weights that are new."""
        task = self.task
        options, about = task.options, task.about
        lines = _of_data("training", task.train_data())
        evaluation = task.eval_data()
        if evaluation is not None:
            lines += _of_data("evaluation", evaluation)
        windows = ", ".join(f"{name} ({window.center:g}, {window.width:g})" for name, window in self._windows())
        lines.append(f"slices: at most {options.max_slices} of {options.image_size} pixels; HU windows: {windows}")
        if about.positive_weights is not None:
            pairs = zip(about.questions, about.positive_weights, strict=True)
            lines.append("weights of yes: " + ", ".join(f"{name} {weight:.3g}" for name, weight in pairs))
        if task.new_weights:
            lines.append(f"not in {options.model}, so initialised: {listed(task.new_weights)}")
        return lines

    def _windows(self) -> list[tuple[str, Any]]:
        names = [choice if isinstance(choice, str) else "window" for choice in self.task.options.windows]
        return list(zip(names, self.task.windows, strict=True))

    def program(self, model: nn.Module) -> Program:
        """Logits and weights of slices of a volume: see `export.risks_of_volume`."""
        return risks_of_volume(self.task, model)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write `volume_risk.json` and `config.json`: see `export.write_export`."""
        write_export(self.task, model, folder)


def _mattered(output: Output) -> list[tuple[int, float, float]]:
    """Number, position and weight of the slices with the largest weights, the largest first."""
    numbers, positions, weights = (output[name].tolist() for name in ("slices", "positions", "attention"))
    found = [row for row in zip(numbers, positions, weights, strict=True) if row[0] >= 0]
    return sorted(found, key=lambda row: -row[2])[:_MATTERED]


def _of_data(name: str, data: Any) -> list[str]:
    """Lines about the volumes that were read, and their known labels by question."""
    lines = [f"{name}: {number_of(len(data), 'volume')} of {number_of(len(set(data.patients)), 'patient')}"]
    for question, column in zip(data.questions, data.labels.T, strict=True):
        yes, no = int((column == 1).sum()), int((column == 0).sum())
        lines.append(f"  {question}: {yes:,} yes, {no:,} no, {len(data) - yes - no:,} unknown")
    return lines + [f"  {note}" for note in data.notes]
