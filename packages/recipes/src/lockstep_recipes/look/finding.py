"""A finding, and what a task needs so that `lockstep look` can find something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from lockstep.core.errors import LockstepError

Level = Literal["error", "warning"]
Finder = Callable[[Any], Iterator["DataFinding"]]
"""find(data): the findings of one fault. `data` is what the task's `data_to_look_at` returns."""


@dataclass(frozen=True)
class DataFinding:
    """One place in the data where something is wrong."""

    level: Level
    """`error`: the training would be wrong, or end. `warning`: a person should look."""
    code: str
    """The fault in one or a few words with hyphens, the same for all its findings: `exif-turned`."""
    file: str
    """Where: a file, a line of a table, a row of a data set."""
    what: str
    """What is wrong in this place, with the value that shows it."""
    remedy: str
    """What to do about it."""
    image: Any = None
    """An image for the page: uint8 (height, width, 3), or a function without arguments that returns it. None: no
    image."""
    count: int = 1
    """How many files this finding is about, if it is one about a whole data set."""


@dataclass(frozen=True)
class Extent:
    """How much of the data is opened."""

    samples: int | None = None
    """The most samples of each split, spread over it. None: all."""
    bytes: int | None = None
    """The most bytes of files of each split: the head of a log must not wait. None: no limit."""

    @property
    def is_short(self) -> bool:
        """True for the head of a log: finders that take long are left out."""
        return self.bytes is not None


HEAD, SAMPLE, ALL = Extent(24, 3 << 20), Extent(1000), Extent()
"""For the head of a run's log; for the command; for the command with --all."""


@runtime_checkable
class Lookable(Protocol):
    """A task whose data can be looked at."""

    finders: Sequence[Finder]

    def data_to_look_at(self, extent: Extent) -> Any:
        """What the finders get. Nothing is opened here: the data opens samples when a finder asks for them.

        Raises:
            LockstepError: the data cannot be read at all. This becomes a finding.
        """
        ...


def of_error(error: LockstepError, code: str = "cannot-be-used") -> DataFinding:
    """The finding for data that the task itself refuses."""
    return DataFinding("error", code, error.where or "", error.what, error.remedy or "correct the data")
