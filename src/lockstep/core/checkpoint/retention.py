"""The config's section `checkpoint`, and the checkpoints that it keeps. It imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from lockstep.core.config.config_section import Section

if TYPE_CHECKING:
    from lockstep.core.checkpoint.manifest import Checkpoint


def _best(text: str) -> str:
    if not re.fullmatch(r"(min|max) eval/\S+", text):
        remedy = "write `max eval/NAME` or `min eval/NAME`, such as `min eval/loss`"
        raise ValueError(f"{text!r} does not say which result is best; {remedy}")
    return text


class CheckpointConfig(Section):
    """The times at which checkpoints are saved, and the choice of those that are kept.

    A checkpoint is due after `every_minutes` or `every_steps`, whichever comes first, and at the end. The `keep_last`
    newest checkpoints are kept, and those that `keep_best` and `keep_every_steps` ask for.
    """

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints. 0: only minutes count."""
    every_minutes: PositiveFloat | None = 10.0
    """Minutes between checkpoints. None: only steps count."""
    mode: Literal["async", "sync"] = "async"
    """async: the training continues while a checkpoint is written."""
    keep_last: PositiveInt = 3
    """Number of the newest checkpoints that are kept."""
    keep_best: Annotated[str, AfterValidator(_best)] | None = None
    """The result whose best checkpoint is kept, such as `max eval/accuracy`. A checkpoint is then saved before each
    evaluation."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this number are kept."""

    @property
    def best(self) -> tuple[str, str] | None:
        """`min` or `max`, and the name of the result by which the best checkpoint is chosen."""
        kind, _, metric = (self.keep_best or "").partition(" ")
        return (kind, metric) if metric else None

    def reasons(self, checkpoints: Iterable[Checkpoint]) -> dict[int, list[str]]:
        """The reasons why a checkpoint stays, by step. Steps whose checkpoint may be deleted are left out."""
        by_step = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
        reasons: dict[int, list[str]] = {}
        for checkpoint in by_step[-self.keep_last :]:
            reasons.setdefault(checkpoint.step, []).append("last")
        best = self.best_of(by_step)
        if best is not None:
            reasons.setdefault(best.step, []).append("best")
        checked = max((one.checked_step for one in by_step), default=-1)
        for step in [one.step for one in by_step if one.step <= checked][-1:]:
            reasons.setdefault(step, []).append("checked")
        for checkpoint in by_step if self.keep_every_steps else ():
            if checkpoint.step % (self.keep_every_steps or 1) == 0:
                reasons.setdefault(checkpoint.step, []).append(f"every {self.keep_every_steps}")
        return reasons

    def best_of(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
        """The best by the metric, and the latest of equal ones. None: no metric was chosen, or none was evaluated."""
        if self.best is None:
            return None
        sign, metric = (-1 if self.best[0] == "min" else 1), self.best[1]
        rated = [one for one in checkpoints if not math.isnan(one.metrics.get(metric, math.nan))]
        return max(rated, key=lambda one: (sign * one.metrics[metric], one.step), default=None)
