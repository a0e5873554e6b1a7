"""A sweep: trainings with different values of some keys, several at once, in a folder that records progress."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lockstep import locks
from lockstep.configs import config_file
from lockstep.core import atomic
from lockstep.core.checkpoint import manifest
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import LockstepError, Preempted, TrainingError, UsageError, did_you_mean, listed
from lockstep.core.parallel import signals
from lockstep_lab.search import processes, study
from lockstep_lab.search.grid import Grid, overrides_of
from lockstep_lab.search.processes import TrialResults

SPEC = "sweep.json"
_LOOK_EVERY_S = 0.3
_SAME_FAILURES = 3  # consecutive: they end a sweep
_MOST_KILLS = 3  # of a trial
_LEAST_ROOM = 2**20  # bytes: with less, a trial may have failed without a message
_FULL = os.strerror(errno.ENOSPC)
_ROOM = "free disk space, or repair permissions; then the same command continues, including this trial"


class TrainingProcess(Protocol):
    """A training in another process: see `processes.Process`."""

    def poll(self) -> int | None:
        """The exit code. None: it is running."""

    def stop(self) -> None:
        """Ask it to save and to stop."""


@dataclass(frozen=True)
class SweepRequest:
    """The request to `lockstep sweep`."""

    target: str
    overrides: Sequence[str]
    config: RunConfig
    grid: Grid
    folder: Path
    trials: int
    parallel: int = 1
    ranks: int = 1
    preset: str | None = None
    """How this machine runs each trial: see `cli.config_preset`. `config` contains its keys."""

    def folder_of(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.folder / f"trial-{number:04}"

    def log_of(self, number: int) -> Path:
        """The file of a trial's output. Its run directory may be recreated."""
        return self.folder / f"trial-{number:04}.log"

    def spec(self) -> dict[str, object]:
        """What identifies a sweep: with other values it is a different one."""
        keys = {f"config: {key}": value for key, value in config_file.training_keys(self.config).items()}
        spec = {"target": self.target, "overrides": list(self.overrides)} | self.grid.spec() | keys
        return dict(json.loads(json.dumps(spec, default=str)))


@dataclass
class _Trial:
    """A running trial."""

    open: study.Open
    slot: int
    training: TrainingProcess
    results: TrialResults
    begun: float = field(default_factory=time.monotonic)
    is_pruned: bool = False
    kills: int = 0


@contextlib.contextmanager
def claimed(order: SweepRequest) -> Iterator[None]:
    """Keep other sweeps out of the folder. Write the request, or compare it with the earlier one.

    Raises:
        UsageError: another sweep is running there, or the folder belongs to a different sweep, or to something else.
    """
    folder, path = order.folder, order.folder / SPEC
    if folder.is_dir() and not path.is_file() and any(one.name[0] != "." for one in folder.iterdir()):
        what = "the folder is not empty, and not a sweep's: it has no sweep.json"
        raise UsageError(what, where=str(folder), remedy="give a new folder with --run-dir")
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locks.locked(folder / ".lock", wait_s=0.0))
            spec = order.spec()
            before = json.loads(path.read_text()) if path.is_file() else spec
            differs = [name for name in {**before, **spec} if before.get(name) != spec.get(name)]
            if not differs:
                atomic.write_text(path, json.dumps(spec, indent=1))
        except locks.LockedError as error:
            remedy = "wait for it, stop it, or give a different folder with --run-dir"
            raise UsageError(f"a sweep is running there: {error}", where=str(folder), remedy=remedy) from None
        except (OSError, ValueError) as error:
            remedy = "choose a different folder with --run-dir"
            raise UsageError(f"cannot be used: {error}", where=str(folder), remedy=remedy) from error
        if differs:
            lines = [f"{name}: {before.get(name)!r} there, {spec.get(name)!r} here" for name in differs]
            what = "\n    ".join(["the folder belongs to a different sweep:", *lines])
            raise UsageError(what, where=str(folder), remedy="give the same values, or a new folder with --run-dir")
        try:
            yield
        except OSError as error:
            raise TrainingError(f"cannot be written: {error.strerror}", where=str(folder), remedy=_ROOM) from error


class Sweep:
    """The loop of a sweep. The caller has claimed the folder.

    Args:
        start: starts a training with the arguments of `lockstep`, the file for its output and variables.
        tell: prints a line for people.
        pause: waits between two polls of the trainings.
    """

    def __init__(
        self,
        order: SweepRequest,
        *,
        start: Callable[[Sequence[str], Path, Mapping[str, str]], TrainingProcess] = processes.Process,
        tell: Callable[[str], None] = print,
        pause: Callable[[], None] = lambda: time.sleep(_LOOK_EVERY_S),
    ) -> None:
        self.order, self.start, self.tell, self.pause = order, start, tell, pause
        self.study = study.Study(order.folder, order.grid, order.config.seed)
        self.environments = processes.environments(order.parallel, order.ranks, order.config.device)
        self.running: list[_Trial] = []
        self.stopped_by = ""
        self.error: LockstepError | None = None
        self.failures: list[str] = []

    def run(self) -> None:
        """Run the trials that are missing, and wait for their end.

        Raises:
            Preempted: a signal asked to stop. All trials have saved, and the same command continues the sweep.
            TrainingError: three consecutive trials failed in the same way.
            UsageError: the log of a trial has no such metric.
        """
        with signals.listening() as flag:
            flag.saves = True
            waiting = []
            for opened in self.study.left_open():
                if opened.should_be_pruned():  # the sweep was killed before the trial ended
                    opened.finish(study.PRUNED)
                else:
                    waiting.append(opened)
            while True:
                if flag.signal is not None and not self.stopped_by:
                    self._stop_all(flag.name)
                for trial in list(self.running):
                    self._look(trial)
                while self._is_free(len(waiting)):
                    self._begin(waiting.pop(0) if waiting else self.study.ask())
                if not self.running:
                    break
                self.pause()
        if self.error is not None:
            raise self.error
        if self.stopped_by:
            raise Preempted(f"stopped by {self.stopped_by}; the running trials have saved")

    def _is_free(self, waiting: int) -> bool:
        is_wanted = waiting > 0 or len(self.study) < self.order.trials
        return not self.stopped_by and is_wanted and len(self.running) < self.order.parallel

    def _stop_all(self, reason: str) -> None:
        self.stopped_by = reason
        if self.running:
            self.tell(f"{reason}: waiting until the running trials have saved")
        for trial in self.running:
            trial.training.stop()

    def _begin(self, opened: study.Open) -> None:
        slot = next(slot for slot in range(self.order.parallel) if slot not in {one.slot for one in self.running})
        results = TrialResults(self.order.folder_of(opened.number), self.order.grid.metric)
        self.running.append(_Trial(opened, slot, self._started(opened, slot), results))

    def _started(self, opened: study.Open, slot: int) -> TrainingProcess:
        order = self.order
        folder, values = order.folder_of(opened.number), overrides_of(opened.values)
        self._wait_for_end_before(folder)
        kept = manifest.listed(folder / "checkpoints")
        how = f"resumes from step {kept[0].step}" if kept else "starts"
        self.tell(f"trial {opened.number:04} {how}: {' '.join(values)}")
        preset = [] if order.preset is None else ["--preset", order.preset]
        options = ["--nproc", str(order.ranks), *preset, "--run-dir", str(folder)]
        arguments = ["train", order.target, *order.overrides, *values, *options]
        return self.start(arguments, order.log_of(opened.number), self.environments[slot])

    def _wait_for_end_before(self, folder: Path) -> None:
        """Wait until the ranks of a killed training or sweep have saved and left the run directory."""
        told = False
        while locks.is_held(folder / ".lock") and signals.current().signal is None:
            if not told:
                self.tell(f"waiting for the end of the training in {folder}, which an earlier start left running")
            told = True
            self.pause()

    def _look(self, trial: _Trial) -> None:
        """Read the results of a trial, and check whether it has ended."""
        code = trial.training.poll()  # before its results, so that its last output is read
        trial.results.read()
        name, names = self.order.grid.metric, trial.results.names
        others = [one for one in names if one.startswith("eval/")]
        if others and name not in names and name.startswith("eval/") and self.error is None:
            what, remedy = (
                f"the evaluations have no {name!r}",
                f"{did_you_mean(name, others)}They have {listed(others)}",
            )
            self.error = UsageError(what, where=str(self.order.grid.path), remedy=remedy)
            self._stop_all("no such metric")
        for value in trial.results.values[trial.open.reported :]:
            if not trial.is_pruned and trial.open.report(value):
                trial.is_pruned = True
                trial.training.stop()
        if code is not None:
            self.running.remove(trial)
            self._end(trial, code)

    def _end(self, trial: _Trial, code: int) -> None:
        order, opened, label = self.order, trial.open, f"trial {trial.open.number:04}"
        where = f"step {trial.results.steps}, {time.monotonic() - trial.begun:.0f} s"
        value = self._value(trial)
        if trial.is_pruned:
            opened.finish(study.PRUNED)
            self.tell(f"{label} pruned: {order.grid.metric} {trial.results.values[opened.reported - 1]:.4g}, {where}")
        elif code == 0 and value is not None:
            opened.finish(study.DONE, value)
            self.failures.clear()
            self.tell(f"{label} done: {order.grid.metric} {value:.4g}, {where}")
        elif code in processes.STOPPED:
            if not self.stopped_by:
                self._stop_all(f"another program stopped {label}")
        elif code < 0 and trial.kills < _MOST_KILLS and not self.stopped_by:
            self.tell(f"{label} was killed by signal {-code} at {where}")
            again = _Trial(opened, trial.slot, self._started(opened, trial.slot), trial.results, trial.begun)
            again.kills = trial.kills + 1
            self.running.append(again)
        elif self.error is None:
            error = f"killed by signal {-code}" if code < 0 else processes.error_in(order.log_of(opened.number))
            error = f"it has no {order.grid.metric} that is a number" if code == 0 else error
            if code and (_FULL in error or shutil.disk_usage(order.folder).free < _LEAST_ROOM):
                self.error = TrainingError(
                    f"{label} failed on a full disk:\n{error}", where=str(order.folder), remedy=_ROOM
                )
                self._stop_all("a full disk")
                return
            opened.finish(study.FAILED, error=error)
            self.tell(f"{label} failed, {where}:\n  " + error.replace("\n", "\n  "))
            self._count_failure(error)

    def _value(self, trial: _Trial) -> float | None:
        """The result of the weights that the run keeps: the best if it keeps these, else the last."""
        grid, kept, values = self.order.grid, self.order.config.checkpoint.best, trial.results.values
        if kept == (grid.direction, grid.metric):
            return trial.results.best(grid.direction)
        return values[-1] if values and math.isfinite(values[-1]) else None

    def _count_failure(self, error: str) -> None:
        self.failures.append(processes.kind_of(error))
        if len(self.failures) >= _SAME_FAILURES and len(set(self.failures[-_SAME_FAILURES:])) == 1:
            self.error = TrainingError(
                f"{_SAME_FAILURES} consecutive trials failed with the same error:\n{error}",
                where=str(self.order.folder),
                remedy="correct it; then the same command continues with the next trial",
            )
            self._stop_all("three failures")
