"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lockstep.data.loader import MicroBatch
from lockstep.data.order import StepPlan
from lockstep.distributed import strategy
from lockstep.distributed.faults import fail_at
from lockstep.distributed.heartbeat import Phase
from lockstep.engine.log_window import LogWindow
from lockstep.engine.memory import Memory
from lockstep.engine.out_of_memory import StepTooLarge
from lockstep.engine.step import StepResult, TrainState, train_step
from lockstep.errors import LockstepError, Preempted, TrainingError

if TYPE_CHECKING:
    from lockstep.observe.writer import Writer

_PROGRESS_S = 0.25
_FIRST_OVERFLOWS = 10  # fp16 begins with a loss scale that is too large, and lowers it step by step


@dataclass(frozen=True)
class Intervals:
    """After how many steps to do what; 0 is never. Each is also done after the last step (if not 0).

    save_s: save also when so many seconds have passed since the last time; 0 is never.
    save_evaluated: save also before each evaluation, so that the best weights are there to keep.
    """

    log: int = 50
    evaluate: int = 0
    save: int = 0
    save_s: float = 0.0
    save_evaluated: bool = False

    def due(self, every: int, step: int, stop: int) -> bool:
        return every > 0 and (step % every == 0 or step == stop)


@dataclass(frozen=True)
class SaveHooks:
    """What keeps the state of a training. Each is called on all ranks after the same step.

    save: this state, with what the evaluation of this very step gave, if there was one.
    add_metrics: add the results of an evaluation to the checkpoint of the step.
    kept: what is on the disk, in words.
    elapsed_s: seconds, the same on all ranks.
    """

    save: Callable[[dict[str, float]], None] = lambda results: None
    add_metrics: Callable[[dict[str, float]], None] = lambda results: None
    kept: Callable[[], str] = lambda: "No checkpoint is saved"
    elapsed_s: Callable[[], float] = lambda: 0.0


def fit(
    state: TrainState,
    batches: Iterator[list[MicroBatch]],
    plan: StepPlan,
    stop: int,
    cadence: Intervals,
    writers: Sequence[Writer],
    evaluate: Callable[[], dict[str, float]],
    keeper: SaveHooks,
    asked_to_stop: Callable[[], bool],
    evaluated: dict[str, float] | None = None,
    on_out_of_memory: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train from `state.step` to `stop`.

    What is due to be saved is saved before it is evaluated: an evaluation that fails loses nothing. The state is also
    saved before the first evaluation of this process, which nobody has seen to succeed.

    Args:
        batches: this rank's micro-batches, step by step.
        evaluate: called on all ranks.
        asked_to_stop: whether any rank was; called on all ranks after each step, with the same answer on all.
        evaluated: what the evaluation at `state.step` gave, where the run goes on from there.
        shrink: called on all ranks when a step did not fit into memory; `batches` then goes on with smaller ones, from `state.step`.

    Returns:
        the last values of everything logged.

    Raises:
        Preempted: on all ranks, after saving.
    """
    meter, memory = (
        LogWindow(state.world, state.coefficients, plan.steps_per_epoch),
        Memory(state, stop, cadence.evaluate > 0),
    )
    evaluate, save = memory.during("evaluation", evaluate), memory.during("saving", keeper.save)
    heartbeat, results = state.world.heartbeat, dict(evaluated or {})
    log = _Log(state, meter, memory, writers, dict(results))
    saved_at, saved_s, late, has_evaluated = state.step, keeper.elapsed_s(), False, False
    shown = done = time.perf_counter()
    heartbeat.step = state.step
    state.forward.train()
    try:
        if state.step and not results and cadence.due(cadence.evaluate, state.step, stop):  # stopped before it was done
            results, has_evaluated = log.evaluation(evaluate, keeper), True
            keeper.add_metrics(results)
        heartbeat.enter(Phase.FIRST_STEP)
        for micros in batches:
            ready = time.perf_counter()
            logs = cadence.due(cadence.log, state.step + 1, stop)
            evaluates = cadence.due(cadence.evaluate, state.step + 1, stop)
            saves = late or cadence.due(cadence.save, state.step + 1, stop)
            saves = saves or (evaluates and (cadence.save_evaluated or not has_evaluated))
            if logs:
                memory.ask()
            try:
                outcome = train_step(state, micros, plan.samples(state.step), want_norm=logs or saves)
            except StepTooLarge:
                if on_out_of_memory is None:
                    raise
                on_out_of_memory()
                continue
            begun, done = done, time.perf_counter()
            heartbeat.step, heartbeat.phase = state.step, Phase.TRAINING
            heartbeat.beats += 1
            meter.add(outcome, ready - begun, done - ready)
            results = {}
            if logs:
                log.window()
            if done - shown > _PROGRESS_S:
                shown = done
                for watcher in writers:
                    watcher.progress(state.step)
            if asked_to_stop() and state.step < stop:
                raise Preempted
            if saves or evaluates:
                meter.check()
            if saves:
                save(results)
                saved_at, saved_s = state.step, keeper.elapsed_s()
            if evaluates:
                results = log.evaluation(evaluate, keeper, save if not saves and state.world.size == 1 else None)
                has_evaluated = True
                if saves:
                    keeper.add_metrics(results)
            late = cadence.save_s > 0 and keeper.elapsed_s() - saved_s >= cadence.save_s
            done = time.perf_counter()
    except Preempted:
        if saved_at < state.step:
            meter.check()
            save(results)
        raise
    return log.latest


@dataclass
class _Log:
    """Gives entries to the watchers. latest: the last value of everything that they were given."""

    state: TrainState
    meter: LogWindow
    memory: Memory
    writers: Sequence[Writer]
    latest: dict[str, float]

    def window(self) -> None:
        """An entry of the steps since the last one."""
        remarks = _idle(self.meter.outcomes)
        entry, complaints = self.meter.entry(self.state)
        figures, table = self.memory.report()
        self._tell(entry | figures, [*complaints, *remarks], table)
        self.latest |= entry | figures

    def evaluation(
        self,
        evaluate: Callable[[], dict[str, float]],
        keeper: SaveHooks,
        save: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """What `evaluate` gives, and an entry of it. Where it fails, the error says what is saved.

        Args:
            save: saves the state first, where it fails. None: the state is saved already, or there are other ranks,
                which may not have failed.
        """
        state, heartbeat = self.state, self.state.world.heartbeat
        before = heartbeat.phase
        heartbeat.enter(Phase.EVALUATING)
        fail_at("evaluating", state.step)
        try:
            results = {f"eval/{name}": value for name, value in evaluate().items()}
        except Exception as error:
            if save is not None:
                with contextlib.suppress(LockstepError):
                    save({})
            _remark(error, keeper.kept())
            raise
        heartbeat.enter(Phase(before))
        elapsed = round(time.perf_counter() - self.meter.started, 3)
        figures, table = self.memory.report(evaluated=True)
        entry = {"step": state.step, "epoch": round(state.step / self.meter.steps_per_epoch, 4), "time_s": elapsed}
        self._tell(entry | results | figures, [], table)
        self.latest |= results | figures
        return results

    def _tell(self, entry: dict[str, float], complaints: Sequence[str], remarks: Sequence[str]) -> None:
        """Give watchers an entry, and what is to be told before and after it."""
        for watcher in self.writers:
            for complaint in complaints:
                watcher.message(complaint)
            watcher.record(entry)
            for remark in remarks:
                watcher.message(remark)


def _idle(outcomes: Sequence[StepResult]) -> list[str]:
    """A warning where no update of a window was applied."""
    if not outcomes or any(outcome.applied for outcome in outcomes):
        return []
    overflowed = sum(any(outcome.totals.values()) for outcome in outcomes)
    if 0 < overflowed == len(outcomes) < _FIRST_OVERFLOWS:
        return []
    causes = [f"{overflowed} gradients overflowed in fp16"] if overflowed else []
    causes += [f"{len(outcomes) - overflowed} global batches had no valid unit"] if overflowed < len(outcomes) else []
    return [f"warning: the last {len(outcomes)} steps changed no weight: {', '.join(causes)}"]


def _remark(error: Exception, text: str) -> None:
    """Add `text` to what an error says."""
    if isinstance(error, LockstepError):
        error.remedy = f"{error.remedy}. {text}" if error.remedy else text
    else:
        error.add_note(text)


def check_any_update(state: TrainState) -> None:
    """Raise at the end of a run of which no update was applied.

    Raises:
        TrainingError: says what may be the cause.
    """
    if state.step > state.skipped or not state.step:
        return
    causes = ["Task.weight counted no unit in any global batch: check the labels (masks, ignore_index) and the weight"]
    if state.precision.name == "fp16":
        causes.insert(0, "the gradients overflowed in fp16: use precision=bf16 or fp32")
    raise TrainingError(
        f"nothing was learned: all {state.step} updates were skipped. The checkpoint holds the weights of the beginning",
        where="end of training",
        remedy=f"{'; or '.join(causes)}. Then start anew with --fresh",
    )


def set_training_mode(forward: nn.Module) -> list[str]:
    """Put a model into training mode. A note of the parts for which that is a change, though the whole was in it."""
    idle = {name: module for name, module in strategy.unwrap(forward).named_modules() if not module.training}
    forward.train()
    changed = [name for name, module in idle.items() if module.training]
    if not changed or "" in idle:
        return []
    more = f" and {len(changed) - 1} more modules" if len(changed) > 1 else ""
    return [
        f"note: Task.model left {changed[0]}{more} in evaluation mode; training puts the whole model into training "
        "mode. To keep a part in evaluation mode, override train() in the model"
    ]
