"""From the differences between two runs to one sentence: what differs first, and the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_lab.bisect.recorded import Suspect
from lockstep_lab.bisect.trace import STAGES, Difference

_DATA = ("data.train", "data.", "source", "library", "task.", "data")
_ARITHMETIC = ("precision", "source", "compute.", "task.", "library", "ranks", "device", "variable", "parallel.")
_CAUSES: dict[str, tuple[str, ...]] = {
    "setup": ("source", "precision", "device", "compute.", "parallel.virtual_ranks", "variable", "library"),
    "order": ("seed", "batch.global", "batch.", "data.", "task.", "ranks", "source", "data"),
    "file": _DATA,
    "bytes": _DATA,
    "decoded": _DATA,
    "prepared": ("task.augment", "seed", "source", "task.", "library", "data."),
    "split": ("ranks", "batch.", "parallel.", "compute."),
    "batch": ("seed", "source", "task.", "data.", "library", "data"),
    "weights": ("seed", "train.init", "task.model", "task.", "source", "precision", "train.parts", "library"),
    "optimizer": ("optim.", "train.init", "source", "library"),
    "moved": ("source", "train.parts", "library"),
    "forward": _ARITHMETIC,
    "loss": _ARITHMETIC,
    "gradient": _ARITHMETIC,
    "exchange": ("train.parts", "parallel.", "ranks", "source", "variable", "library", "optim.clip_norm", "device"),
    "settings": ("optim.", "schedule.", "batch.", "train.", "source"),
    "update": ("optim.", "train.parts", "source", "library", "device"),
    "evaluated": ("data.eval", "data.", "source", "task.", "library"),
    "outputs": ("source", "train.ema_decay", "task.", "library", "precision"),
    "results": ("source", "task.", "data.eval", "library"),
}
"""By stage: beginnings of the keys of `Suspect` that explain it, the most likely first."""
_SHOWN = 3


@dataclass(frozen=True)
class BisectVerdict:
    """The answer of a bisection."""

    step: int
    stage: str
    """One of `STAGES`. Empty: nothing differs."""
    rank: int
    sentence: str
    cause: str
    """Empty: nothing that is recorded explains it."""
    others: list[str]
    """Recorded differences that explain it less."""
    next: str
    """A command that shows more."""


def judged(difference: Difference, suspects: Sequence[Suspect], run: str, first_step: int) -> BisectVerdict:
    """The verdict on the first difference.

    Args:
        run: the directory of the second run, for the next command.
        first_step: the first step that was made.
    """
    stage, step = difference.stage, difference.step
    words = STAGES[stage]
    if stage == "weights" and step == first_step:
        words = "the initial weights"
    ranked = sorted(suspects, key=lambda one: _place(one, stage))
    likely = [one for one in ranked if _place(one, stage) < len(_CAUSES[stage])]
    best = [one for one in likely if _place(one, stage) == _place(likely[0], stage)][:_SHOWN]
    best = best or ranked[:1]
    place = f"step {step}, rank {difference.rank}" if step else "before step 1"
    place += f", {difference.sample}" if difference.sample else ""
    cause = "; ".join(one.text for one in best)
    sentence = f"First difference: {place}: {words} ({difference.what})."
    sentence += f" Likely cause: {cause}" if cause else " Nothing that the runs record explains it"
    follow = f"lockstep replay {run} --step {max(1, step)} --samples"
    if stage in ("evaluated", "outputs", "results"):
        follow = f"lockstep evaluate {run}"
    return BisectVerdict(
        step, stage, difference.rank, sentence, cause, [one.text for one in ranked if one not in best], follow
    )


def _place(suspect: Suspect, stage: str) -> int:
    causes = _CAUSES[stage]
    return next((at for at, begin in enumerate(causes) if suspect.key.startswith(begin)), len(causes))
