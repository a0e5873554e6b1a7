"""The place at which `lockstep verify` joins a script: the first `Loop` that the script makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lockstep.core.part import Part
from lockstep.trainer import user_exit

if TYPE_CHECKING:
    from lockstep.trainer.user_loop_task import LoopTask


LoopT = TypeVar("LoopT")


class LoopTrial(ABC, Generic[LoopT]):
    """A short run of a script in its own folder. It ends the process when the first `Loop` has ended."""

    folder: Path
    """Takes the place of the run directory, and gets the files that `Loop.save` writes."""
    parts: Sequence[Part] = ()
    """Join the training."""

    @abstractmethod
    def changed(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of the config instead of those that the script asks for."""

    @abstractmethod
    def prepare(self, task: LoopTask) -> None:
        """Change the task before the training is put together."""

    @abstractmethod
    def joined(self, loop: LoopT) -> None:
        """The training is put together. All ranks call it."""

    @abstractmethod
    def ended(self, loop: LoopT) -> None:
        """The loop has ended, or the script has left it. All ranks call it."""


_current: LoopTrial[Any] | None = None
_is_taken = False


def begin(trial: LoopTrial[Any]) -> None:
    """Let the next `Loop` of this process take part in `trial`."""
    global _current, _is_taken
    _current, _is_taken = trial, False


def end() -> None:
    """Let loops be as the script writes them again."""
    global _current
    _current = None


def take() -> LoopTrial[Any] | None:
    """The trial of a new `Loop`. None: an ordinary run.

    Raises:
        SystemExit: an earlier `Loop` has had the trial, so all is done.
    """
    global _is_taken
    if _current is not None and _is_taken:
        user_exit.close_open()
        raise SystemExit(0)
    _is_taken = True
    return _current
