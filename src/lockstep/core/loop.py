"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.core import devices
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.order import StepPlan
from lockstep.core.errors import LockstepError, Preempted, TrainingError
from lockstep.core.joined_parts import JoinedParts
from lockstep.core.log_window import LogWindow
from lockstep.core.parallel.faults import fail_at
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.step import StepResult, TrainState, train_step
from lockstep.core.stopping import Stopping
from lockstep.core.training_log import TrainingLog
from lockstep.parts.epoch_log import EpochLog
from lockstep.parts.memory import MemoryMonitor
from lockstep.parts.replica_probe import ReplicaProbe

if TYPE_CHECKING:
    from lockstep.core.writer import Writer


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
    end_requested: Callable[[], bool] = lambda: False
    """Whether a Part on any rank asks for the end of the training: the same answer on all ranks."""
    finish: Callable[[], None] = lambda: None
    """After the last step: wait until everything is saved."""
    probe: ReplicaProbe | None = None
    """Compares the ranks after steps and before saves. None: they are not compared."""


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
    parts: JoinedParts | None = None,
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
        parts: join the training, and may end it.

    Returns:
        the last value of everything logged.

    Raises:
        Preempted: on all ranks, after saving.
        TrainingError: a loss or a gradient is not finite; names the step, the rank and the samples.
    """
    window = LogWindow(state.world, state.coefficients, plan.steps_per_epoch, state.metrics)
    memory = MemoryMonitor(state, stop=stop, evaluates=intervals.evaluate > 0)
    parts = parts or JoinedParts((), state, last_step=stop, steps_per_epoch=plan.steps_per_epoch)
    parts.results.update(evaluated or {})
    log = TrainingLog(state, window, memory, writers, parts, memory_tables)
    epochs = EpochLog(
        state, window, plan, stop=stop, lines=intervals.epoch_lines, header=hooks.epoch_header, writers=writers
    )
    stopping = stopping or Stopping()
    loop = _Loop(state, intervals, hooks, stop=stop, stopping=stopping, log=log, epochs=epochs, parts=parts)
    device = devices.of(state.world.device)
    state.world.heartbeat.step = state.step
    state.forward.train()
    try:
        loop.evaluate_late()
        if stopping.reason() or stopping.time_is_up(0.0) or parts.ended:
            return log.latest
        if state.step < stop:
            parts.start()
        state.world.heartbeat.enter(Phase.FIRST_STEP)
        asked = device.mark()
        for micro_batches in batches:
            waited, due = (asked, device.mark()), loop.before_step()
            result = train_step(state, micro_batches, plan.samples(state.step), want_norm=due.log or due.save)
            loop.add(result, micro_batches, waited, due)
            parts.call("after_step")
            if due.log:
                log.window_entry()
            if hooks.probe is not None:
                loop.compare_ranks(hooks.probe, micro_batches)
            if due.epoch_end and not due.evaluate:
                epochs.end({})
            log.progress()
            if hooks.stop_requested() and state.step < loop.stop:
                raise Preempted
            if parts.agree(now=due.log or hooks.end_requested()) and state.step < loop.stop:
                due = loop.last_step(due)
            if due.save or due.evaluate:
                window.check_finite()
            if due.save:
                loop.save({})
            if due.evaluate:
                loop.evaluate(due)
            if loop.ends_early:
                break
            loop.note_late_save()
            asked = device.mark()
    except Preempted:
        if loop.saved_at < state.step:
            window.check_finite()
            loop.save({})
        raise
    log.memory_line()
    hooks.finish()
    if parts.has_started:
        parts.call("end")
        log.entry_of_parts()
    return log.latest


class _Due(NamedTuple):
    """What follows a step, in this order, but for the end of an epoch, which comes after an evaluation."""

    log: bool
    epoch_end: bool
    save: bool
    evaluate: bool


@dataclass
class _Loop:
    """What `fit` remembers from step to step, and what it does between steps. All ranks call each method alike."""

    state: TrainState
    intervals: Intervals
    hooks: Hooks
    stop: int
    """The last step. It becomes an earlier step when the time is up."""
    stopping: Stopping
    log: TrainingLog
    epochs: EpochLog
    parts: JoinedParts
    has_evaluated: bool = False
    """Whether an evaluation of this process has succeeded."""
    save_is_late: bool = False
    """Whether the next step is saved, because the last save was too long ago."""
    ends_early: bool = False
    """Whether the training ends after this step."""

    def __post_init__(self) -> None:
        self.saved_at, self.saved_s = self.state.step, self.hooks.elapsed_s()

    def evaluate_late(self) -> None:
        """Evaluate before the first step, where the run was stopped between a step and its evaluation."""
        step, intervals = self.state.step, self.intervals
        has_ended = self.stopping.time_is_up(0.0) or self.parts.ended  # then it is evaluated, too
        end = step if has_ended else self.stop
        if step and not self.log.latest and intervals.due(intervals.evaluate, step, end):
            self.parts.start()
            ends = step % self.epochs.plan.steps_per_epoch == 0
            self.evaluate(_Due(log=True, epoch_end=ends, save=True, evaluate=True))  # it is logged and saved already

    def before_step(self) -> _Due:
        """Begin an epoch, where the next step is its first. Returns what follows the next step."""
        step, intervals = self.state.step + 1, self.intervals
        if self.stopping.max_time_s is not None and self.stopping.time_is_up(self.hooks.elapsed_s()):
            self.stop, self.ends_early = step, True
        if step > self.epochs.ends_at:
            self.epochs.begin()
        if self.state.unfreezing is not None and self.state.step and self.state.step in self.state.unfreezing.steps:
            self.epochs.begin_phase()
        logs = intervals.due(intervals.log, step, self.stop)
        evaluates = intervals.due(intervals.evaluate, step, self.stop)
        saves = self.save_is_late or intervals.due(intervals.save, step, self.stop)
        saves = saves or (evaluates and (intervals.save_evaluated or not self.has_evaluated))
        if logs:
            self.log.memory.count_in_next_step()
        return _Due(log=logs, epoch_end=step == self.epochs.ends_at, save=saves, evaluate=evaluates)

    def add(self, result: StepResult, micro_batches: list[MicroBatch], waited: tuple[Any, Any], due: _Due) -> None:
        """Add a step to the figures of the log. For `waited`, see `LogWindow.add`."""
        state, heartbeat = self.state, self.state.world.heartbeat
        heartbeat.step, heartbeat.phase = state.step, Phase.TRAINING
        heartbeat.beats += 1
        self.log.window.add(result, waited)
        if state.flops is not None and result.losses:
            state.flops.add(micro_batches)
            if due.log:
                with self.log.window.excluded():
                    state.flops.count(micro_batches[0])

    def compare_ranks(self, probe: ReplicaProbe, micro_batches: list[MicroBatch]) -> None:
        """After a step: compare the ranks, if that is due."""
        with self.log.window.excluded() if probe.due() else contextlib.nullcontext(), self._with_checkpoints():
            probe.after_step(micro_batches)

    @contextlib.contextmanager
    def _with_checkpoints(self) -> Generator[None, None, None]:
        """Where a comparison fails inside, the error says what is saved."""
        try:
            yield
        except TrainingError as error:
            _add_to_message(error, self.hooks.describe_checkpoints())
            raise

    def save(self, results: dict[str, float]) -> None:
        """Save the state, with the results of the evaluation of this step, if there was any."""
        with self.log.window.excluded(saving=True):
            self.parts.call("before_save")
            if self.hooks.probe is not None:
                with self._with_checkpoints():
                    self.hooks.probe.before_save()
            self.log.memory.measured("saving", self.hooks.save)(results)
        self.saved_at, self.saved_s = self.state.step, self.hooks.elapsed_s()

    def note_late_save(self) -> None:
        """Let a save follow the next step, where the last save was too long ago."""
        every_s = self.intervals.save_s
        self.save_is_late = every_s > 0 and self.hooks.elapsed_s() - self.saved_s >= every_s

    def evaluate(self, due: _Due) -> None:
        """Evaluate after a step. Where its results end the training, also do what else follows a last step."""
        with self.log.window.excluded():
            results = self._evaluated(is_saved=due.save)
        self.has_evaluated = True
        is_ended = self.parts.agree(now=True)
        if due.save:
            self.hooks.add_metrics(results)
        self.stopping.add(self.state.step, results)
        if due.epoch_end:
            self.epochs.end(results)
        if (self.stopping.reason() or is_ended) and self.state.step < self.stop:
            self.ends_early = True
            if not due.log:
                self.log.window_entry()
            if not due.save:
                self.save(results)

    def last_step(self, due: _Due) -> _Due:
        """What follows a step that a Part makes the last."""
        self.ends_early = True
        if not due.log:
            self.log.window_entry()
        evaluates = self.intervals.evaluate > 0
        return _Due(log=True, epoch_end=due.epoch_end and due.evaluate, save=True, evaluate=evaluates)

    def _evaluated(self, *, is_saved: bool) -> dict[str, float]:
        """Evaluate, and write an entry of the results. Where the evaluation fails, the error says what is saved."""
        state, heartbeat = self.state, self.state.world.heartbeat
        phase, begun = heartbeat.phase, time.perf_counter()
        heartbeat.enter(Phase.EVALUATING)
        fail_at("evaluating", state.step)
        try:
            values = self.log.memory.measured("evaluation", self.hooks.evaluate)()
        except Exception as error:
            if not is_saved and state.world.size == 1:  # other ranks may not have failed
                with contextlib.suppress(LockstepError):
                    self.save({})
            _add_to_message(error, self.hooks.describe_checkpoints())
            raise
        heartbeat.enter(Phase(phase))
        results = {f"eval/{name}": value for name, value in values.items()}
        self.log.evaluation_entry(results, begun)
        return results


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
