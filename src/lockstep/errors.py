"""What Lockstep says when something is wrong: what, where, and what to do about it."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches


class LockstepError(Exception):
    """A failure that the user can act on.

    Args:
        what: the fault and the value that shows it.
        where: file, key, rank, step or sample; None where `what` says it all.
        remedy: what to change; None where nothing can be advised.
    """

    exit_code = 1
    retryable = False  # whether the same command may go well the next time: then a launcher may try
    retries_differently = (
        False  # whether it will be done in another way the next time, so that failing at the same step is not the same
    )

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (loader workers, ranks); keyword arguments do not survive by default.
        return _rebuild, (type(self), self.what, self.where, self.remedy)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text


def _rebuild(kind: type[LockstepError], what: str, where: str | None, remedy: str | None) -> LockstepError:
    return kind(what, where=where, remedy=remedy)


class UsageError(LockstepError):
    """A wrong command, config or recipe: found before anything is computed. Exit code 2."""

    exit_code = 2


class DataError(LockstepError):
    """A data set or a sample that cannot be used."""

    retryable = True  # files may come back


class TrainingError(LockstepError):
    """The training itself went wrong: a loss that is not finite, a parameter without gradient."""


class MemoryShortage(TrainingError):
    """The memory of a device does not suffice. The next start takes smaller micro-batches."""

    retryable = retries_differently = True


class CheckpointError(LockstepError):
    """A checkpoint that is missing, damaged or of another model."""


class RankError(LockstepError):
    """A rank failed. Raised on the others, and by the launcher.

    origin: the rank that failed first and what it said; None where this rank is the one.
    """

    retryable = True
    origin: tuple[int, str] | None = None


class Preempted(BaseException):
    """A signal asked this run to stop, and it did. No failure, so no `Exception`: nothing may swallow it on its way out.

    Exit code 75 (EX_TEMPFAIL): run the same command again.
    """

    exit_code = 75


def did_you_mean(name: object, known: Iterable[str], prefix: str = "") -> str:
    """`did you mean X? ` with the nearest of `known`, whatever its case; empty where none is near."""
    by_lower = {one.lower(): one for one in known}
    nearest = get_close_matches(str(name).lower(), by_lower, 1, 0.5)
    return f"did you mean {prefix}{by_lower[nearest[0]]}? " if nearest else ""


@contextlib.contextmanager
def exits_are_failures() -> Iterator[None]:
    """Turn a `SystemExit` of a task into an error: a training that it ended must not look as if it were done."""
    try:
        yield
    except SystemExit as error:
        libraries = (f"{os.sep}site-packages{os.sep}", sysconfig.get_path("stdlib") + os.sep)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not any(library in frame.filename for library in libraries)]
        last = (own or frames)[-1]
        raise TrainingError(
            f"the task called sys.exit({'' if error.code is None else repr(error.code)})",
            where=f"{last.filename}:{last.lineno}, in {last.name}",
            remedy="raise an exception where something is wrong; where nothing is, return",
        ) from error


def short_traceback(error: BaseException) -> str:
    """The traceback without the frames inside installed libraries, but for the last one: what the user can change."""
    frames = traceback.extract_tb(error.__traceback__)
    library = f"{os.sep}site-packages{os.sep}"
    kept = [frame for number, frame in enumerate(frames) if library not in frame.filename or number == len(frames) - 1]
    lines = traceback.format_list(kept) + traceback.format_exception_only(error)
    return "Traceback (frames inside libraries are left out):\n" + "".join(lines).rstrip()
