"""`--profile`: a trace of some steps, and the operations that take most of their time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, final

from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.errors import UsageError
from lockstep.core.part import Training

if TYPE_CHECKING:
    from lockstep.core.build import Run

FOLDER = "profile"
_WARM_UP = 5  # steps before a window, if only its length is given
_SLOWEST = 10
_STEP = "lockstep step "
_NAMED = 3  # operations that the log names
# Names of events in which the host waits for the device, or for a copy from it. CUDA's and ROCm's runtimes use these
# names, torch the others. `aten::item` calls `aten::_local_scalar_dense`, so the second counts both.
_WAITS = re.compile(r"(cuda|hip)((Stream|Device|Event)Synchronize|Memcpy(ToHost)?(_v\d+)?)$|aten::_local_scalar_dense$")


@dataclass(frozen=True)
class ProfileWindow:
    """The steps to profile."""

    first: int | None
    """The first step, counted from 1 as in the log. None: after some steps of this start."""
    steps: int
    """Number of steps."""

    def first_after(self, step: int) -> int:
        """The first profiled step of a training that resumes after `step` steps."""
        return step + _WARM_UP + 1 if self.first is None else self.first


def parse(text: str) -> ProfileWindow:
    """`5-10`: steps 5 to 10. `6`: six steps, after the first five steps of this start.

    Raises:
        UsageError: the text is neither.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)-)?([1-9]\d*)", text.strip())
    if match is not None:
        first, last = match[1] and int(match[1]), int(match[2])
        if not first:
            return ProfileWindow(None, last)
        if first <= last:
            return ProfileWindow(first, last - first + 1)
    remedy = "write two steps, such as 5-10, or a number of steps, such as 6"
    raise UsageError(f"{text!r} does not name steps", where="--profile", remedy=remedy)


@final
class Profiler(BuiltInPart):
    """Profiles a window of steps with torch's profiler, and leaves no trace in the training.

    Use it as a context: the recording is written even if training fails.

    Args:
        window: the steps.
    """

    def __init__(self, window: ProfileWindow, run: Run) -> None:
        from lockstep.core import devices  # which imports torch

        self.state, self.stop, self.tell = run.state, run.stop, run.tell
        self.folder = run.folder / FOLDER
        """Receives `rank<r>.json`, for chrome://tracing or ui.perfetto.dev; and from rank 0 `rank0.txt`."""
        self.activities = devices.of(run.world.device).profiled()
        """The sources of the recording: the host, and the device if it has its own events."""
        self.first = window.first_after(run.first_step)
        self.last = self.first + window.steps - 1
        self.begun_at = max(self.first, run.first_step + 1)
        self.profile: Any = None
        self.label: Any = None
        self.is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def start(self, training: Training) -> None:
        self.after_step(training)

    def after_step(self, training: Training) -> None:
        assert isinstance(training, Inside)
        if not self.is_over:
            self._before(training.step + 1, training.window.excluded)

    def _write(self, apart: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        """Write the recording, unless that was done. A file that cannot be written does not end the training.

        Args:
            apart: the time inside it does not count as training time.
        """
        if self.is_over:
            return
        self.is_over = True
        if self.label is None:
            what = f"steps {self.first} to {self.last} were not trained"
            self.tell(f"warning: nothing was profiled, because {what} in this start")
            return
        rank = self.state.world.rank
        try:
            self._close_label()
            self.profile.stop_trace()
            with apart():
                self.folder.mkdir(parents=True, exist_ok=True)
                self.profile.export_chrome_trace(str(self.folder / f"rank{rank}.json"))
                if rank == 0:
                    self._report(min(self.state.step, self.last))
        except Exception as error:
            self.tell(f"warning: the profile was not written: {type(error).__name__}: {error}")
        self.profile = None

    def _before(self, step: int, apart: Callable[[], AbstractContextManager[None]]) -> None:
        """Get ready for a step, before its batch is read."""
        from torch.profiler import profile, record_function

        if step > min(self.last, self.stop):
            self._write(apart)
            return
        # A step early, because the profiler's start takes time. In torch 2.11 a prepared profiler must be started.
        if self.profile is None and step >= self.first - 1 and self.first <= self.stop:
            with apart():
                self.profile = profile(activities=self.activities, acc_events=True)
                self.profile.prepare_trace()
        if step >= self.first:
            if self.label is None:
                self.begun_at = step
                self.profile.start_trace()
            self._close_label()
            self.label = record_function(f"{_STEP}{step}")
            self.label.__enter__()

    def _close_label(self) -> None:
        if self.label is not None:
            self.label.__exit__(None, None, None)

    def _report(self, last: int) -> None:
        averages = self.profile.key_averages()
        rows = slowest(averages)
        waits = {event.key: event.count for event in averages if _WAITS.match(event.key)}
        steps = last - self.begun_at + 1
        title = f"rank 0, steps {self.begun_at} to {last}"
        lines = [f"{title}: the {len(rows)} operations with the most self time", ""]
        lines += _table(rows)
        lines += ["", f"The host waited for the device, or read a number: {_listed(waits, steps)}", ""]
        (self.folder / "rank0.txt").write_text("\n".join(lines))
        named = ", ".join(f"{row.name} {row.share:.0%}" for row in rows[:_NAMED])
        self.tell(
            f"profile of {title}: {named}; waits of the host: {_listed(waits, steps)}; see {self.folder}/rank0.txt"
        )


@dataclass(frozen=True)
class OperationTotals:
    """An operation: all its calls together."""

    name: str
    calls: int
    host_ms: float
    """Milliseconds of the host, without the operations that it called."""
    device_ms: float
    """Milliseconds of the kernels that it started itself."""
    share: float
    """Of the time of all operations: on the device if it has any, otherwise on the host."""


def slowest(averages: Sequence[Any]) -> list[OperationTotals]:
    """The operations with the most self time, from `torch.profiler.profile.key_averages`."""
    rows = [
        OperationTotals(
            event.key, event.count, event.self_cpu_time_total / 1e3, event.self_device_time_total / 1e3, 0.0
        )
        for event in averages
        if not event.key.startswith(_STEP) and event.device_type.name == "CPU"  # kernels are with their operations
    ]
    on_device = any(row.device_ms for row in rows)

    def time(row: OperationTotals) -> float:
        return row.device_ms if on_device else row.host_ms

    total = sum(map(time, rows)) or 1.0
    return [replace(row, share=time(row) / total) for row in sorted(rows, key=time, reverse=True)[:_SLOWEST]]


def _table(rows: Sequence[OperationTotals]) -> list[str]:
    width = max([len(row.name) for row in rows] + [9])
    lines = [f"{'operation':<{width}}  {'calls':>7}  {'host ms':>10}  {'device ms':>10}  {'share':>6}"]
    lines += [
        f"{row.name:<{width}}  {row.calls:>7}  {row.host_ms:>10.3f}  {row.device_ms:>10.3f}  {row.share:>6.1%}"
        for row in rows
    ]
    return lines


def _listed(waits: Mapping[str, int], steps: int) -> str:
    """`aten::_local_scalar_dense 12 (2.0 in a step)`."""
    listed = (f"{name} {count} ({count / steps:.1f} in a step)" for name, count in sorted(waits.items()))
    return ", ".join(listed) or "never"
