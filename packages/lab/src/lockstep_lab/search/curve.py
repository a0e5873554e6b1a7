"""From the losses of a range test to a learning rate: pure functions.

The losses are smoothed by an exponential average with bias correction, and the suggestion is where the smoothed loss
falls most steeply over the logarithm of the rate: the rule of fastai and Lightning, after Smith, "Cyclical Learning
Rates for Training Neural Networks", 2017 (arXiv:1506.01186, section 3.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.errors import UsageError, number_of

DIVERGED = 4.0
"""The test ends when the smoothed loss is this many times the smallest."""
_SKIPPED = 0.1  # of the steps: the average of the first few is hardly smoothed
_LEAST_FALL = 5.0  # times the error of the smoothed loss: the minimum of many is biased low


@dataclass(frozen=True)
class Suggestion:
    """The result of a range test. A rate of None: it cannot be determined, for the reason in `why`."""

    steepest: float | None
    """The rate at which the smoothed loss falls most steeply."""
    tenth_of_minimum: float | None
    """A tenth of the rate with the smallest smoothed loss."""
    why: str = ""
    """Why there is no rate, or a remark on the rates."""


def check(low: float, high: float, steps: int) -> None:
    """Check the range of a test.

    Raises:
        UsageError: the range is invalid.
    """
    if not 0 < low < high < math.inf:
        remedy = "give two rates above 0, the lower first, such as --from 1e-7 --to 10"
        raise UsageError(f"from {low:g} to {high:g} is not a range", where="--from, --to", remedy=remedy)
    if steps < 10:
        raise UsageError(
            f"{number_of(steps, 'step', 'shows', 'show')} no curve",
            where="--steps",
            remedy="use at least 10 steps, better 100",
        )


def rate_at(step: int, steps: int, low: float, high: float) -> float:
    """The rate of a step, counted from 0, in a test that rises exponentially from `low` to `high` in `steps` steps."""
    return float(low * (high / low) ** (step / max(1, steps - 1)))


def keep_of(steps: int) -> float:
    """The weight of the old average at each step: it looks back over a twentieth of the test, or 5 steps."""
    return 1 - 1 / max(5.0, steps / 20)


def smoothed(losses: Sequence[float], keep: float) -> list[float]:
    """The exponential average of losses, corrected for its start at zero."""
    average, found = 0.0, []
    for count, loss in enumerate(losses, 1):
        average = keep * average + (1 - keep) * loss
        found.append(average / (1 - keep**count))
    return found


def diverges(averages: Sequence[float]) -> bool:
    """True if the last smoothed loss is four times the smallest, or not finite."""
    least = min(averages)
    return not math.isfinite(averages[-1]) or averages[-1] > least + (DIVERGED - 1) * abs(least)


def suggest(rates: Sequence[float], losses: Sequence[float], keep: float) -> Suggestion:
    """The rates to train with.

    Args:
        rates: of the steps.
        losses: of the steps, before their updates. They end before the first that is not finite.
    """
    skipped = max(2, round(_SKIPPED * len(losses)))
    if not losses:
        return Suggestion(None, None, "there are no losses: check the data and the model")
    if len(losses) < skipped + 3:
        return Suggestion(
            None,
            None,
            f"only {number_of(len(losses), 'step', 'has', 'have')} a loss: start at a lower rate, or use more steps",
        )
    averages = smoothed(losses, keep)
    place = min(range(skipped, len(averages)), key=averages.__getitem__)
    fall = max(averages[skipped], sum(losses[:skipped]) / skipped) - averages[place]
    if place == skipped or fall <= 0:
        return Suggestion(None, None, "the loss never falls: start at a lower rate, or check the data and the loss")
    steps = [(after - before) ** 2 / 2 for before, after in itertools.pairwise(losses[: place + 1])]
    error = math.sqrt(sum(steps) / len(steps) * (1 - keep) / (1 + keep))
    if fall < _LEAST_FALL * error or fall < 1e-3 * abs(averages[skipped]):
        what = f"the loss is flat: it falls by {fall:.3g}, with an error of {error:.2g}"
        return Suggestion(None, None, f"{what}. Use more steps, or end at a higher rate")
    slopes = [averages[at + 1] - averages[at - 1] for at in range(skipped, place)]
    steepest = skipped + min(range(len(slopes)), key=slopes.__getitem__)
    if place >= len(losses) - 2:
        why = "the loss still falls at the highest rate: test up to a higher rate"
        return Suggestion(rates[steepest], None, why)
    return Suggestion(rates[steepest], rates[place] / 10)
