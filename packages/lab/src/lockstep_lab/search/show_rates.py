"""The result of a range test, as lines for people and as a chart."""

from __future__ import annotations

from lockstep.core.errors import number_of
from lockstep_lab.search.chart import BLUE, PALE, Axis, SweepChart
from lockstep_lab.search.learning_rate import RangeTest


def text(found: RangeTest) -> str:
    """The suggestion with the keys to use, or why there is none."""
    lines = [f"{number_of(len(found.losses), 'step')}" + (f", ended early: {found.ended}" if found.ended else "")]
    if found.averages:
        place = min(range(len(found.averages)), key=found.averages.__getitem__)
        lines[0] += f"; the smallest smoothed loss is {found.averages[place]:.4g} at {found.rates[place]:.2g}"
    advised = found.suggestion
    if advised.steepest is None:
        return "\n".join([*lines, f"no suggestion: {advised.why}"])
    lines.append(f"steepest descent:     {' '.join(found.overrides(advised.steepest))}")
    if advised.tenth_of_minimum is not None:
        lines.append(f"a tenth of the rate with the least loss: {' '.join(found.overrides(advised.tenth_of_minimum))}")
    if found.scale != 1.0:
        lines.append(
            f"optim.lr_scaling multiplies these rates by {found.scale:.4g}: the optimizer gets "
            f"{advised.steepest * found.scale:.2g} for the first"
        )
    if advised.why:
        lines.append(f"note: {advised.why}")
    return "\n".join(lines)


def chart(found: RangeTest, name: str) -> SweepChart:
    """The losses over the rate, and the suggestion. The loss axis ends a little above the first losses."""
    first = found.averages[0]
    top = max([first, *found.averages[: len(found.averages) // 2 + 1]])
    least = min(found.losses)
    limit = top + (top - least)
    shown = [min(loss, limit) for loss in found.losses]
    labels = {"steepest": found.suggestion.steepest, "minimum / 10": found.suggestion.tenth_of_minimum}
    return SweepChart(
        f"{name}: range test of the learning rate",
        Axis("optim.lr", found.rates, log=True),
        Axis("loss", shown),
        lines=[(found.rates, shown, PALE), (found.rates, [min(loss, limit) for loss in found.averages], BLUE)],
        marks={f"{label} {rate:.2g}": rate for label, rate in labels.items() if rate is not None},
    )
