"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.data.loader import Micro
from lockstep.data.order import StepPlan
from lockstep.dist.faults import fail_at
from lockstep.dist.heart import Phase
from lockstep.engine.memory import Memory
from lockstep.engine.meter import Meter
from lockstep.engine.oom import StepTooLarge
from lockstep.engine.step import Training, train_step
from lockstep.errors import Preempted

_PROGRESS_S = 0.25


class Watcher(Protocol):
    """Receives plain records; reads, and never steers."""

    def record(self, entry: dict[str, float]) -> None: ...
    def progress(self, step: int) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Cadence:
    """After how many steps to do what; 0 is never. Each is also done after the last step (if not 0).

    save_evaluated: save also after each evaluation, so that the best weights are there to keep.
    """

    log: int = 50
    evaluate: int = 0
    save: int = 0
    save_evaluated: bool = False

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
    asked_to_stop: Callable[[], bool],
    evaluated: dict[str, float] | None = None,
    shrink: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train from `run.step` to `stop`.

    Args:
        batches: this rank's micro-batches, step by step.
        evaluate, save: called on all ranks; `save` gets what the evaluation at this very step gave.
        asked_to_stop: whether any rank was; called on all ranks after each step, with the same answer on all.
        evaluated: what the evaluation at `run.step` gave, where the run goes on from there.
        shrink: called on all ranks when a step did not fit into memory; `batches` then goes on with smaller ones, from `run.step`.

    Returns:
        the last values of everything logged.

    Raises:
        Preempted: on all ranks, after saving.
    """
    meter, memory = Meter(run.world, run.coefficients, plan.steps_per_epoch), Memory(run, stop, cadence.evaluate > 0)
    evaluate, save = memory.during("evaluation", evaluate), memory.during("saving", save)
    heart = run.world.heart
    results = dict(evaluated or {})
    latest = dict(results)
    saved_at = run.step
    shown = done = time.perf_counter()
    heart.step = run.step
    try:
        if run.step and not results and cadence.due(cadence.evaluate, run.step, stop):  # stopped before it was done
            results = _evaluate(run, plan, meter, memory, evaluate, watchers, latest)
            if cadence.save_evaluated:
                save(results)
        heart.enter(Phase.FIRST_STEP)
        for micros in batches:
            ready = time.perf_counter()
            logs = cadence.due(cadence.log, run.step + 1, stop)
            if logs:
                memory.ask()
            try:
                outcome = train_step(run, micros, plan.samples(run.step), want_norm=logs)
            except StepTooLarge:
                if shrink is None:
                    raise
                shrink()
                continue
            begun, done = done, time.perf_counter()
            heart.step, heart.phase = run.step, Phase.TRAINING
            heart.beats += 1
            meter.add(outcome, ready - begun, done - ready)
            results = {}
            if logs:
                entry, complaints = meter.entry(run)
                figures, table = memory.report()
                latest |= _tell(watchers, entry | figures, complaints, table)
            if done - shown > _PROGRESS_S:
                shown = done
                for watcher in watchers:
                    watcher.progress(run.step)
            if cadence.due(cadence.evaluate, run.step, stop):
                meter.check()
                results = _evaluate(run, plan, meter, memory, evaluate, watchers, latest)
            if cadence.due(cadence.save, run.step, stop) or (results and cadence.save_evaluated):
                meter.check()
                save(results)
                saved_at = run.step
            if asked_to_stop() and run.step < stop:
                raise Preempted
            done = time.perf_counter()
    except Preempted:
        if saved_at < run.step:
            meter.check()
            save(results)
        raise
    return latest


def _evaluate(
    run: Training,
    plan: StepPlan,
    meter: Meter,
    memory: Memory,
    evaluate: Callable[[], dict[str, float]],
    watchers: Sequence[Watcher],
    latest: dict[str, float],
) -> dict[str, float]:
    """What the evaluation gives; logged, and with the memory it took among the `latest` values."""
    heart = run.world.heart
    before = heart.phase
    heart.enter(Phase.EVALUATING)
    fail_at("evaluating", run.step)
    results = {f"eval/{name}": value for name, value in evaluate().items()}
    heart.enter(Phase(before))
    elapsed = round(time.perf_counter() - meter.started, 3)
    figures, table = memory.report(evaluated=True)
    _tell(watchers, {"step": run.step, "epoch": round(run.step / plan.steps_per_epoch, 4), "time_s": elapsed} | results | figures, [], table)
    latest |= results | figures
    return results


def _tell(watchers: Sequence[Watcher], entry: dict[str, float], complaints: Sequence[str], remarks: Sequence[str]) -> dict[str, float]:
    """Give watchers an entry, and what is to be told before and after it."""
    for watcher in watchers:
        for complaint in complaints:
            watcher.message(complaint)
        watcher.record(entry)
        for remark in remarks:
            watcher.message(remark)
    return entry
