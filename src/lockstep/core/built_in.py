"""The base of Lockstep's own Parts: they see the state of the training, and the steps of the log."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from lockstep.core.part import Part, Training

if TYPE_CHECKING:
    from lockstep.core.data.loader import MicroBatch
    from lockstep.core.log_window import LogWindow
    from lockstep.core.step import TrainState


@dataclass(kw_only=True)
class Inside(Training):
    """The view that a Part of Lockstep's own has of a training: more than other Parts see."""

    _reserved: ClassVar[tuple[str, ...]] = ()
    state: TrainState
    window: LogWindow
    """The steps since the last entry of the log. In `log_entry`: `window.last` has those of the entry."""
    micro_batches: Sequence[MicroBatch] = ()
    """This rank's micro-batches: in `before_step` of the next step, in `after_step` and `log_entry` of the last."""
    parts: Sequence[str] = ()
    """The names of the user's Parts."""
    writes: Mapping[str, str] = field(default_factory=dict)
    """By name of a user's Part that has written weights on this rank: the first of them, and the event."""
    left: set[str] = field(default_factory=set)
    """Events at which this Part no longer needs to be called. It may add some."""


class BuiltInPart(Part):
    """A Part of Lockstep's own. `Training` in its events is always `Inside`."""

    sees_writes: ClassVar[bool] = False
    """True if it reads `Inside.writes`, which takes time with each event of a user's Part."""

    def apart(self, what: str) -> AbstractContextManager[None]:
        """A context around work on all ranks that is not training.

        Args:
            what: `evaluation` or `saving`.
        """
        return contextlib.nullcontext()
