"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep import devices
from lockstep.data.loader import MicroBatch
from lockstep.data.order import StepPlan
from lockstep.distributed.faults import fail_at
from lockstep.distributed.heartbeat import Phase
from lockstep.distributed.strategy import Strategy
from lockstep.engine.epoch_log import EpochLog
from lockstep.engine.log_window import LogWindow
from lockstep.engine.memory import MemoryMonitor
from lockstep.engine.out_of_memory import StepTooLarge
from lockstep.engine.step import StepResult, TrainState, train_step
from lockstep.engine.stopping import Stopping
from lockstep.errors import LockstepError, Preempted, TrainingError

if TYPE_CHECKING:
    from lockstep.observe.writer import Writer

_PROGRESS_S = 0.25
_FIRST_OVERFLOWS = 10  # fp16 begins with a loss scale that is too large, and lowers it step by step


@dataclass(frozen=True)
class Intervals:
    """How many steps lie between two log entries, evaluations and saves. 0 means never.

    What is not "never" also happens after the last step.
    """

    log: int = 50
    """Steps."""
    evaluate: int = 0
    """Steps."""
    save: int = 0
    """Steps."""
    save_s: float = 0.0
    """Seconds: a save is also due when so much time has passed since the last save. 0 means never."""
    save_evaluated: bool = False
    """Also save before each evaluation, so that the best weights can be kept."""
    epoch_lines: bool = False
    """Whether a line is written where an epoch begins, and where it ends."""

    def due(self, every: int, step: int, stop: int) -> bool:
        """Whether what happens every `every` steps happens after `step` steps of a training that ends at `stop`."""
        return every > 0 and (step % every == 0 or step == stop)


@dataclass(frozen=True)
class Hooks:
    """What the loop calls. All ranks call each hook after the same step. Each default does nothing."""

    evaluate: Callable[[], dict[str, float]] = dict
    """Evaluate the model; returns results by name."""
    save: Callable[[dict[str, float]], None] = lambda results: None
    """Save the state, with the results of the evaluation of this very step, if there was any."""
    add_metrics: Callable[[dict[str, float]], None] = lambda results: None
    """Add the results of an evaluation to the checkpoint of this step."""
    describe_checkpoints: Callable[[], str] = lambda: "No checkpoint is saved"
    """Say what is on the disk."""
    elapsed_s: Callable[[], float] = lambda: 0.0
    """Seconds since the training began: the same number on all ranks."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether any rank was asked to stop: the same answer on all ranks."""
    epoch_header: Callable[[int], str] = lambda epoch: ""
    """What the task says where an epoch begins. Called on ranks with writers only."""
    on_out_of_memory: Callable[[], None] | None = None
    """Cut the batches from this step on into smaller micro-batches. None: a step that does not fit is an error."""


def fit(
    state: TrainState,
    batches: Iterator[list[MicroBatch]],
    *,
    plan: StepPlan,
    stop: int,
    intervals: Intervals,
    hooks: Hooks,
    writers: Sequence[Writer] = (),
    evaluated: dict[str, float] | None = None,
    stopping: Stopping | None = None,
    memory_tables: bool = False,
) -> dict[str, float]:
    """Train from `state.step` to `stop`, or until `stopping` ends the training.

    A due checkpoint is saved before the evaluation of the same step: an evaluation that fails loses nothing. The state
    is also saved before the first evaluation of this process, because nobody has seen that evaluation succeed.

    Args:
        batches: this rank's micro-batches, step by step.
        plan: which samples the steps take.
        evaluated: results of the evaluation at `state.step`, where the run goes on from a checkpoint that has them.
        stopping: decides after each evaluation whether the training ends there, and before each step whether that step
            is the last, because the time is up. What happens after the last step then happens, too.
        memory_tables: whether people are shown tables of the memory by rank and purpose, besides a line at the end.

    Returns:
        the last value of everything logged.

    Raises:
        Preempted: on all ranks, after saving.
        TrainingError: a loss or a gradient is not finite; names the step, the rank and the samples.
    """
    window = LogWindow(state.world, state.coefficients, plan.steps_per_epoch)
    memory = MemoryMonitor(state, stop=stop, evaluates=intervals.evaluate > 0)
    evaluate, save = memory.measured("evaluation", hooks.evaluate), memory.measured("saving", hooks.save)
    heartbeat, results = state.world.heartbeat, dict(evaluated or {})
    stopping = stopping or Stopping()
    log = _Log(state, window, memory, writers, dict(results), memory_tables)
    epochs = EpochLog(
        state, window, plan, stop=stop, lines=intervals.epoch_lines, header=hooks.epoch_header, writers=writers
    )
    epoch_end = state.step
    saved_at, saved_s, save_is_late, has_evaluated = state.step, hooks.elapsed_s(), False, False
    ends_early = False
    device, shown = devices.of(state.world.device), float("-inf")  # the first step is shown at once
    heartbeat.step = state.step
    state.forward.train()
    try:
        end = state.step if stopping.time_is_up(0.0) else stop  # where its time is up, a run is evaluated too
        if state.step and not results and intervals.due(intervals.evaluate, state.step, end):
            with window.excluded():
                results, has_evaluated = log.evaluation(evaluate, hooks), True  # the run was stopped before it
            hooks.add_metrics(results)
            stopping.add(state.step, results)
            if state.step % plan.steps_per_epoch == 0:
                epochs.end(results, trained=False)
        if stopping.reason() or stopping.time_is_up(0.0):
            return log.latest
        heartbeat.enter(Phase.FIRST_STEP)
        asked = device.mark()
        for micro_batches in batches:
            waited, step = (asked, device.mark()), state.step + 1
            if stopping.max_time_s is not None and stopping.time_is_up(hooks.elapsed_s()):
                stop, ends_early = step, True
            if step > epoch_end:
                epoch_end = epochs.begin()
            logs = intervals.due(intervals.log, step, stop)
            evaluates = intervals.due(intervals.evaluate, step, stop)
            saves = save_is_late or intervals.due(intervals.save, step, stop)
            saves = saves or (evaluates and (intervals.save_evaluated or not has_evaluated))
            if logs:
                memory.count_in_next_step()
            try:
                result = train_step(state, micro_batches, plan.samples(state.step), want_norm=logs or saves)
            except StepTooLarge:
                if hooks.on_out_of_memory is None:
                    raise
                hooks.on_out_of_memory()
                asked = device.mark()
                continue
            heartbeat.step, heartbeat.phase = state.step, Phase.TRAINING
            heartbeat.beats += 1
            window.add(result, waited)
            if state.flops is not None and result.losses:
                state.flops.add(micro_batches)
            results = {}
            if logs:
                if state.flops is not None and result.losses:
                    with window.excluded(), state.guard.update(state.step, "the count of operations"):
                        state.flops.count(micro_batches[0])
                log.window_entry()
            if step == epoch_end and not evaluates:
                epochs.end(results)
            if time.perf_counter() - shown > _PROGRESS_S:
                shown = time.perf_counter()
                log.progress()
            if hooks.stop_requested() and state.step < stop:
                raise Preempted
            if saves or evaluates:
                window.check_finite()
            if saves:
                with window.excluded(saving=True):
                    save(results)
                saved_at, saved_s = state.step, hooks.elapsed_s()
            if evaluates:
                with window.excluded():
                    results = log.evaluation(evaluate, hooks, save if not saves and state.world.size == 1 else None)
                has_evaluated = True
                if saves:
                    hooks.add_metrics(results)
                stopping.add(step, results)
                if step == epoch_end:
                    epochs.end(results)
                if stopping.reason() and step < stop:
                    ends_early = True
                    if not logs:
                        log.window_entry()
                    if not saves:
                        save(results)
            if ends_early:
                break
            save_is_late = intervals.save_s > 0 and hooks.elapsed_s() - saved_s >= intervals.save_s
            asked = device.mark()
    except Preempted:
        if saved_at < state.step:
            window.check_finite()
            save(results)
        raise
    log.memory_line()
    return log.latest


@dataclass
class _Log:
    """Gives entries to the writers."""

    state: TrainState
    window: LogWindow
    memory: MemoryMonitor
    writers: Sequence[Writer]
    latest: dict[str, float]
    """The last value of everything that the writers were given."""
    memory_tables: bool = False
    """Whether tables of the memory are shown."""

    def window_entry(self) -> None:
        """Write an entry of the steps since the last entry."""
        warnings = _idle_warning(self.window.results)
        entry, unreadable = self.window.entry(self.state)
        figures, lines = self.memory.report()
        self._write(entry | figures, before=[*unreadable, *warnings], after=self._shown(lines))
        self.latest |= entry | figures

    def _shown(self, table: list[str]) -> list[str]:
        return table if self.memory_tables else []

    def memory_line(self) -> None:
        """Say at the end how much memory the ranks held. All ranks call it."""
        line = self.memory.line()
        for writer in self.writers:
            writer.message(line)

    def progress(self) -> None:
        """Tell the writers how far the training is."""
        for writer in self.writers:
            writer.progress(self.state.step)

    def evaluation(
        self,
        evaluate: Callable[[], dict[str, float]],
        hooks: Hooks,
        save: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Evaluate, and write an entry of the results. Where the evaluation fails, the error says what is saved.

        Args:
            save: saves the state where the evaluation fails. None: the state is saved already, or there are other
                ranks, which may not have failed.
        """
        state, heartbeat = self.state, self.state.world.heartbeat
        phase, begun = heartbeat.phase, time.perf_counter()
        heartbeat.enter(Phase.EVALUATING)
        fail_at("evaluating", state.step)
        try:
            results = {f"eval/{name}": value for name, value in evaluate().items()}
        except Exception as error:
            if save is not None:
                with contextlib.suppress(LockstepError):
                    save({})
            _add_to_message(error, hooks.describe_checkpoints())
            raise
        heartbeat.enter(Phase(phase))
        now = time.perf_counter()
        elapsed = round(now - self.window.started, 3)
        figures, lines = self.memory.report(evaluated=True)
        figures |= self.memory.highest_of("evaluation")
        entry = {"step": state.step, "epoch": round(state.step / self.window.steps_per_epoch, 4), "time_s": elapsed}
        took = {"time/evaluation_s": round(now - begun, 4)}
        self._write(entry | results | took | figures, before=[], after=self._shown(lines))
        self.latest |= results | figures
        return results

    def _write(self, entry: dict[str, float], *, before: Sequence[str], after: Sequence[str]) -> None:
        for writer in self.writers:
            for text in before:
                writer.message(text)
            writer.record(entry)
            for text in after:
                writer.message(text)


def _idle_warning(results: Sequence[StepResult]) -> list[str]:
    """A warning where no update of a window was applied."""
    if not results or any(result.applied for result in results):
        return []
    overflowed = sum(any(result.totals.values()) for result in results)
    if 0 < overflowed == len(results) < _FIRST_OVERFLOWS:
        return []
    causes = [f"{overflowed} gradients overflowed in fp16"] if overflowed else []
    without_units = len(results) - overflowed
    causes += [f"{without_units} global batches had no valid unit"] if without_units else []
    return [f"warning: the last {len(results)} steps changed no weight: {', '.join(causes)}"]


def _add_to_message(error: Exception, text: str) -> None:
    if isinstance(error, LockstepError):
        error.remedy = f"{error.remedy}. {text}" if error.remedy else text
    else:
        error.add_note(text)


def check_any_update(state: TrainState) -> None:
    """Raise at the end of a run in which no update was applied.

    Raises:
        TrainingError: names the likely causes.
    """
    if state.step > state.skipped or not state.step:
        return
    causes = ["Task.weight counted no unit in any global batch: check the labels (masks, ignore_index) and the weight"]
    if state.precision.name == "fp16":
        causes.insert(0, "the gradients overflowed in fp16: use precision=bf16 or fp32")
    raise TrainingError(
        f"nothing was learned: all {state.step} updates were skipped. The checkpoint holds the initial weights",
        where="end of training",
        remedy=f"{'; or '.join(causes)}. Then start anew with --fresh",
    )


def set_training_mode(strategy: Strategy) -> list[str]:
    """Put a model into training mode.

    Returns:
        a note, where a part of the model was in evaluation mode although the whole was in training mode.
    """
    modes = {name: module for name, module in strategy.model.named_modules() if not module.training}
    strategy.forward.train()
    changed = [name for name, module in modes.items() if module.training]
    if not changed or "" in modes:
        return []
    more = f" and {len(changed) - 1} more modules" if len(changed) > 1 else ""
    return [
        f"note: Task.model left {changed[0]}{more} in evaluation mode; training puts the whole model into training "
        "mode. To keep a part in evaluation mode, override train() in the model"
    ]
