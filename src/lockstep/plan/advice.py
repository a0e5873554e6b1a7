"""A piece of advice on a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What limits a run, and what to change."""

    name: str
    """The rule, such as `waiting for data`."""
    finding: str
    """What limits the run, for people."""
    source: str
    """The figures of the log or of the config that say so."""
    changes: tuple[str, ...]
    """Overrides of the config, such as `data.workers=4`. Empty: no key helps."""
    gain: str
    """What the change may bring, for people."""
    saves_share: float = 0.0
    """Share of the run's time that the change may save. 0: it saves memory, or the gain in time is not known."""
    note: str = ""
    """What else there is to know."""
