"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.data.loader import Micro
from lockstep.data.order import StepPlan
from lockstep.engine.meter import Meter
from lockstep.engine.step import Training, train_step

_PROGRESS_S = 0.25


class Watcher(Protocol):
    """Receives plain records; reads, and never steers."""

    def record(self, entry: dict[str, float]) -> None: ...
    def progress(self, step: int) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Cadence:
    """After how many steps to do what; 0 is never. Each is also done after the last step (if not 0)."""

    log: int = 50
    evaluate: int = 0
    save: int = 0

    def due(self, every: int, step: int, stop: int) -> bool:
        return every > 0 and (step % every == 0 or step == stop)


def fit(
    run: Training,
    batches: Iterator[list[Micro]],
    plan: StepPlan,
    stop: int,
    cadence: Cadence,
    watchers: Sequence[Watcher],
    evaluate: Callable[[], dict[str, float]],
    save: Callable[[dict[str, float]], None],
) -> dict[str, float]:
    """Train from `run.step` to `stop`.

    Args:
        batches: this rank's micro-batches, step by step.
        evaluate, save: called on all ranks; `save` gets the latest results.

    Returns:
        the last values of everything logged.
    """
    meter = Meter(run.world, run.coefficients, plan.steps_per_epoch)
    latest: dict[str, float] = {}
    shown = done = time.perf_counter()
    for micros in batches:
        ready = time.perf_counter()
        logs = cadence.due(cadence.log, run.step + 1, stop)
        outcome = train_step(run, micros, plan.samples(run.step), want_norm=logs)
        begun, done = done, time.perf_counter()
        meter.add(outcome, ready - begun, done - ready)
        if logs:
            entry, complaints = meter.entry(run)
            latest |= _tell(watchers, entry, complaints)
        if done - shown > _PROGRESS_S:
            shown = done
            for watcher in watchers:
                watcher.progress(run.step)
        if cadence.due(cadence.evaluate, run.step, stop):
            meter.check()
            results = {f"eval/{name}": value for name, value in evaluate().items()}
            latest |= _tell(watchers, _stamp(run, plan, meter) | results, [])
        if cadence.due(cadence.save, run.step, stop):
            meter.check()
            save(latest)
        done = time.perf_counter()
    return latest


def _stamp(run: Training, plan: StepPlan, meter: Meter) -> dict[str, float]:
    elapsed = round(time.perf_counter() - meter.started, 3)
    return {"step": run.step, "epoch": round(run.step / plan.steps_per_epoch, 4), "time_s": elapsed}


def _tell(watchers: Sequence[Watcher], entry: dict[str, float], complaints: Sequence[str]) -> dict[str, float]:
    for watcher in watchers:
        for complaint in complaints:
            watcher.message(complaint)
        watcher.record(entry)
    return entry
