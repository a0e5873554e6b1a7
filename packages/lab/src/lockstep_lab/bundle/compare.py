"""How a step that was made again from a bundle differs from the recorded one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lockstep.core.errors import number_of
from lockstep_lab.bundle.again import StepAgain

_ROUNDING = 1e-4
"""Relative: two sums of the same gradients in different orders differ by less."""


@dataclasses.dataclass(frozen=True)
class BundleReport:
    """The comparison of a step with its record."""

    made: StepAgain
    first: str
    """What differs first. Empty: nothing does."""
    compared: list[str]
    """Lines: what was compared, and how."""

    @property
    def is_equal(self) -> bool:
        """True if all that can be the same bits is."""
        return not self.first


def compare(made: StepAgain) -> BundleReport:
    """Compare a step with its record. See `text` for people."""
    about, again = made.about, dataclasses.asdict(made.step)
    recorded: dict[str, Any] = about["recorded"]
    ranks = about["ranks"]
    first = _passes(recorded["passes"], again["passes"])
    each = "each micro-batch, computed separately: its tensors, its losses and the gradients of all parameters"
    if ranks > 1:
        each = (
            f"each micro-batch of each of the {ranks} ranks, computed separately as this rank: "
            + each.partition(": ")[2]
        )
    whole = _whole(recorded, again)
    if ranks == 1 or about["virtual_ranks"] is not None or not whole:
        what = "the step: loss, gradients, their norm, and the state after it"
        return BundleReport(made, first or whole, [each, what])
    norms = recorded["grad_norm"], again["grad_norm"]
    apart = abs(norms[1] - norms[0]) / max(abs(norms[0]), 1e-300) if None not in norms else 0.0
    text = "the sum over ranks, which one process adds up in a different order, to rounding: gradient norm "
    text += f"{norms[1]:.9g}, recorded {norms[0]:.9g}: {apart:.1g} apart, relatively"
    too_far = f"the gradient norm of the step: {norms[1]!r}, recorded {norms[0]!r}" if apart > _ROUNDING else ""
    return BundleReport(made, first or too_far, [each, text])


def _passes(recorded: list[dict[str, Any]], again: list[dict[str, Any]]) -> str:
    """The first difference between micro-batches."""
    for then, now in zip(recorded, again, strict=True):
        place = f"rank {then['rank']}, micro-batch {then['number']}"
        if then["batch"] != now["batch"]:
            return f"the tensors of {place}"
        if found := _values(then["losses"], now["losses"]):
            return f"the loss of {place}: {found}"
        if found := _tensors(then["gradients"], now["gradients"]):
            return f"a gradient of {place}, before the exchange: {found}"
    return ""


def _whole(recorded: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """The first difference between steps."""
    if found := _values(recorded["losses"], again["losses"]):
        return f"the loss of the step: {found}"
    if recorded["grad_norm"] != again["grad_norm"]:
        return f"the gradient norm of the step: {again['grad_norm']!r}, recorded {recorded['grad_norm']!r}"
    if found := _tensors(recorded["gradients"], again["gradients"]):
        return f"a gradient of the step: {found}"
    if found := _tensors(recorded["state"], again["state"]):
        return f"the state after the step: {found}"
    return ""


def _values(then: Mapping[str, float], now: Mapping[str, float]) -> str:
    names = [name for name in {**then, **now} if repr(then.get(name)) != repr(now.get(name))]
    return "" if not names else f"{names[0]} {now.get(names[0])!r}, recorded {then.get(names[0])!r}"


def _tensors(then: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> str:
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return "" if not names else f"{names[0]}, and {len(names) - 1} more of {number_of(len(then), 'tensor')}"


def text(report: BundleReport) -> str:
    """The report for a terminal."""
    about, step = report.made.about, report.made.step
    logged = about["logged"].get("loss")
    lines = list(report.made.notes)
    for head, loss in step.losses.items():
        then = about["recorded"]["losses"].get(head)
        lines.append(f"{head}: {loss:.9g}, recorded {then:.9g}" + ("" if logged is None else f", logged {logged:.9g}"))
    if step.grad_norm is not None:
        lines.append(f"gradient norm: {step.grad_norm:.9g}, recorded {about['recorded']['grad_norm']:.9g}")
    lines.append("compared:")
    lines += [f"  {one}" for one in report.compared]
    lines.append("bitwise equal" if report.is_equal else f"first difference: {report.first}")
    if report.is_equal and len(report.compared) == 2 and "rounding" in report.compared[1]:
        lines[-1] = "each rank is bitwise equal, and their sum is equal to rounding"
    return "\n".join(lines)


def as_json(report: BundleReport) -> str:
    """All numbers of the report."""
    made = report.made
    values = {
        "equal": report.is_equal,
        "first_difference": report.first,
        "compared": report.compared,
        "notes": made.notes,
        "again": dataclasses.asdict(made.step),
        "recorded": made.about["recorded"],
    }
    return json.dumps(values, indent=1)
