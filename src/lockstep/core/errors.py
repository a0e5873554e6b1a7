"""The errors of Lockstep. Each says what is wrong, where, and what to do about it."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher

from lockstep.core.code_files import LOCKSTEP, PYTHON, is_own_code, library_of

SKIP = (
    "set data.on_error=skip to continue without it (a run that has begun: with --allow-change data.on_error; predict: "
    "--on-error skip)"
)
"""The end of a remedy for a sample that cannot be read."""
_METHODS = ("setup", "model", "train_data", "eval_data", "weight", "loss", "predict", "metrics")  # of `Task`
_NEAR = 0.6  # `did_you_mean` shows a name with this share of the letters in common


class LockstepError(Exception):
    """A failure that the user can act on.

    Args:
        what: the fault, and the value that shows it.
        where: the file, key, rank, step or sample. None if `what` says it.
        remedy: what to change. None if no change can be advised.
    """

    exit_code = 1
    """Exit code of the command."""
    retryable = False
    """True if the same command may succeed the next time. Then a launcher starts the ranks again."""
    retries_differently = False
    """True if the next start does the same step in a different way, so that a second failure at this step is another
    failure."""
    from_outside = False
    """True if something outside of the training caused it: a signal, a GPU, another rank. Otherwise the ranks of a new
    run that has not made a step are not started again, because they would do the same."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (loader workers, ranks); keyword arguments do not survive by default.
        return functools.partial(type(self), self.what, where=self.where, remedy=self.remedy), ()

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text


class UsageError(LockstepError):
    """A wrong command, config, task or recipe, found before anything is computed. Exit code 2."""

    exit_code = 2


class DataError(LockstepError):
    """A data set or a sample that cannot be used."""

    retryable = True  # a missing file may come back


class TrainingError(LockstepError):
    """A fault of the training itself: a loss that is not finite, a parameter without gradient."""


class WatchError(LockstepError):
    """The watch found that ranks do not compute the same, and says who is at fault. Exit code 3."""

    exit_code = 3
    guilty: tuple[int, ...] = ()
    """Ranks whose device, memory or link is at fault. Empty: it is not theirs, or not known."""


class MemoryShortage(TrainingError):
    """The memory of a device is not sufficient. The next start uses smaller micro-batches."""

    retryable = retries_differently = True


class DeviceError(LockstepError):
    """A GPU reported an error. The process that got the error can no longer use the GPU."""

    from_outside = True
    retryable = True  # `core.parallel.device_errors` sets it to False if the same step would fail again


class CheckpointError(LockstepError):
    """A checkpoint that is missing or damaged, or belongs to a different model."""


class RankError(LockstepError):
    """A rank failed. The other ranks and the launcher raise this error."""

    retryable = from_outside = True
    origin: tuple[int, str] | None = None
    """The rank that failed first, and its message. None if this rank failed first, or does not know the first."""
    lost_another: bool = False
    """True if this rank failed because it lost the connection to another rank, which gave no reason."""


_NOT_BEGUN = "before training began; nothing was lost"


class Preempted(BaseException):
    """A signal asked this run to stop, and the run has stopped.

    This is not a failure. It is not an `Exception`, so that no handler for failures catches it.
    Exit code 75 (EX_TEMPFAIL): run the same command again.
    """

    exit_code = 75
    is_in_log = False
    """True if the log of the run has its text, which the terminal shows unless the run is quiet."""

    @classmethod
    def before_training(cls, asked_by: str = "") -> Preempted:
        """The exception of a run that has not trained since its command was started."""
        return cls(f"stopped {f'by {asked_by} ' if asked_by else ''}{_NOT_BEGUN}")

    @property
    def remedy(self) -> str:
        """The sentence about the same command: it resumes only what has begun."""
        return f"the same command {'starts again' if _NOT_BEGUN in str(self) else 'resumes from there'}"


def did_you_mean(name: object, known: Iterable[str], prefix: str = "") -> str:
    """`did you mean X? ` with the name in `known` that is nearest to `name` in any case. Empty if no name is near.

    Leading parts that both names have (`eval/`, `optim.`) bring them no nearer.
    """
    nearness = {candidate: _nearness(str(name).lower(), candidate.lower()) for candidate in known}
    nearest = max(nearness, key=nearness.__getitem__, default="")
    return f"did you mean {prefix}{nearest}? " if nearness.get(nearest, 0.0) >= _NEAR else ""


def number_of(number: int, noun: str, verb: str = "", verb_of_many: str = "") -> str:
    """A number and what it counts, in singular or plural: `1 step`, or with verbs `1 file is` and `2 files are`."""
    if number == 1:
        return f"1 {noun} {verb}".rstrip()
    if noun.endswith(("s", "x", "tch", "sh")):
        plural = f"{noun}es"
    else:
        plural = f"{noun[:-1]}ies" if re.search("[^aeiou]y$", noun) else f"{noun}s"
    return f"{number:,} {plural} {verb_of_many}".rstrip()


def listed(names: Sequence[str], most: int = 10) -> str:
    """The first `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _nearness(name: str, candidate: str) -> float:
    """The share of letters that two names have in common, in their order."""
    parts, others = (re.split(r"(?<=[./])", text) for text in (name, candidate))
    while len(parts) > 1 and len(others) > 1 and parts[0] == others[0]:
        parts, others = parts[1:], others[1:]
    return SequenceMatcher(None, "".join(parts), "".join(others)).ratio()


@contextlib.contextmanager
def exits_are_failures() -> Iterator[None]:
    """Turn a `SystemExit` of a task into an error: a training that was ended in this way must not look complete."""
    try:
        yield
    except SystemExit as error:
        raise exit_of_task(error) from error


def exit_of_task(error: SystemExit) -> TrainingError:
    """The error that says where a task called `sys.exit`."""
    frame = frame_of_task(error)
    return TrainingError(
        f"the task called sys.exit({'' if error.code is None else repr(error.code)})",
        where=f"{frame.filename}:{frame.lineno}, in {frame.name}",
        remedy="raise an exception if something is wrong, else return",
    )


def frame_of_task(error: BaseException) -> traceback.FrameSummary:
    """The last frame in a user's own code; else the last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if is_own_code(frame.filename)), frames[-1])


def described(error: BaseException) -> str:
    """The traceback of an error that Lockstep does not know, below a line on the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if library_of(frame.filename) == LOCKSTEP]
    inner = frames[ours[-1] + 1 :] if ours else []
    called = [frame for frame in inner if library_of(frame.filename) != PYTHON][:1]  # a script is run by runpy
    if not called or not is_own_code(called[0].filename):
        return short_traceback(error)
    frame, method = frame_of_task(error), called[0].name
    failed = f"Task.{method} failed: " if method in _METHODS else ""
    line = f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return f"{line}: {failed}{type(error).__name__}: {error}\n{short_traceback(error)}"


def short_traceback(error: BaseException) -> str:
    """The traceback without the frames before the user's code and inside installed libraries, except for the last."""
    frames = list(traceback.extract_tb(error.__traceback__))
    first = next((number for number, frame in enumerate(frames) if is_own_code(frame.filename)), 0)
    frames = frames[first:]
    shown = (None, LOCKSTEP, PYTHON)
    last = len(frames) - 1
    kept = [frame for number, frame in enumerate(frames) if number == last or library_of(frame.filename) in shown]
    lines = traceback.format_list(kept) + traceback.format_exception_only(error)
    return "Traceback (frames inside libraries are left out; --debug shows all):\n" + "".join(lines).rstrip()
