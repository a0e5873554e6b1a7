"""The training loop: step, log, evaluate, save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.core import devices
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.order import StepPlan
from lockstep.core.errors import LockstepError, Preempted, TrainingError, number_of
from lockstep.core.joined_parts import JoinedParts
from lockstep.core.parallel.faults import fail_at
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.stop_consensus import StopConsensus
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.step import StepResult, TrainState, Update
from lockstep.core.stopping import Stopping
from lockstep.core.training_log import TrainingLog
from lockstep.core.writer import Writer


@dataclass(frozen=True)
class Intervals:
    """The number of steps between two log entries, evaluations and saves. 0 means never.

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

    def due(self, every: int, step: int, stop: int) -> bool:
        """True if what happens every `every` steps happens after `step` steps of a training that ends at `stop`."""
        return every > 0 and (step % every == 0 or step == stop)


class Keeper:
    """Keeps the states of a training. This class keeps nothing. All ranks call each method after the same step."""

    def save(self, results: dict[str, float]) -> None:
        """Save the state, with the results of the evaluation of this step, if there was any."""

    def add_metrics(self, results: dict[str, float]) -> None:
        """Add the results of an evaluation to the checkpoint of this step."""

    def check_place(self) -> None:
        """Raise a TrainingError if the states can no longer be kept where they were. Called before work that writes."""

    def kept(self) -> str:
        """A sentence on the states that are kept, for errors."""
        return "No checkpoint is saved"

    def finish(self) -> None:
        """After the last step: wait until everything is saved."""


@dataclass
class NextStep:
    """A step that is to be made. Whoever drives `steps` makes it, and sends its result."""

    micro_batches: list[MicroBatch]
    """Of this rank."""
    samples: int
    """Size of the global batch, over all ranks."""
    want_norm: bool
    """Whether the norm of the gradient is wanted."""

    def made_by(self, update: Update, state: TrainState) -> StepResult:
        """Make the step."""
        return update(state, self.micro_batches, self.samples, want_norm=self.want_norm)


class LeftLoop(BaseException):
    """Thrown into `steps` between two steps: whoever drives it ends the training early. The state is saved."""


def steps(
    state: TrainState,
    batches: Iterable[list[MicroBatch]],
    *,
    plan: StepPlan,
    stop: int,
    intervals: Intervals,
    parts: JoinedParts,
    consensus: StopConsensus,
    evaluate: Callable[[], dict[str, float]] = dict,
    keeper: Keeper | None = None,
    writers: Sequence[Writer] = (),
    evaluated: dict[str, float] | None = None,
    stopping: Stopping | None = None,
) -> Generator[NextStep, StepResult, dict[str, float]]:
    """Train from `state.step` to `stop`, or until `stopping` or a Part ends the training.

    It is a generator: it yields each step that is to be made, and is sent the result.

    A due checkpoint is saved before the evaluation of the same step: an evaluation that fails loses nothing. The state
    is also saved before the first evaluation of this process, because that evaluation may fail.

    Args:
        batches: this rank's micro-batches, step by step.
        plan: which samples the steps take.
        parts: join the training, and may end it.
        consensus: says on all ranks alike whether a rank was asked to stop.
        evaluate: evaluates the model; returns results by name.
        keeper: keeps the states. None: nothing is kept.
        evaluated: results of the evaluation at `state.step`, if the run resumes from a checkpoint that has them.
        stopping: decides after each evaluation whether the training ends there, and before each step whether that step
            is the last, because the time is up. What happens after the last step then happens, too.

    Returns:
        the last value of everything logged.

    Raises:
        Preempted: on all ranks, after saving.
        TrainingError: a loss or a gradient is not finite; names the step, the rank and the samples.
    """
    parts.results.update(evaluated or {})
    log, stopping = TrainingLog(state, parts.window, writers, parts), stopping or Stopping()
    keeper, device = keeper or Keeper(), devices.of(state.world.device)
    loop = _Loop(state, intervals, evaluate, keeper, consensus, stop=stop, stopping=stopping, log=log, parts=parts)
    try:
        if not loop.begin():
            return log.latest
        asked = device.mark()
        for micro_batches in batches:
            waited, due = (asked, device.mark()), loop.before_step(micro_batches)
            result = yield NextStep(micro_batches, plan.samples(state.step), any(due))
            loop.after_step(result, waited, due)
            if loop.ends_early:
                break
            asked = device.mark()
    except (Preempted, LeftLoop):
        loop.save_unsaved()
        raise
    loop.end()
    return log.latest


class _Due(NamedTuple):
    """The work that follows a step, in this order."""

    log: bool
    save: bool
    evaluate: bool


@dataclass
class _Loop:
    """The memory of `steps` from step to step, and its work between steps. All ranks call each method alike."""

    state: TrainState
    intervals: Intervals
    run_evaluation: Callable[[], dict[str, float]]
    keeper: Keeper
    consensus: StopConsensus
    stop: int
    """The last step. It becomes an earlier step when the time is up."""
    stopping: Stopping
    log: TrainingLog
    parts: JoinedParts
    has_evaluated: bool = False
    """True if an evaluation of this process has succeeded."""
    save_is_late: bool = False
    """True if the next step is saved, because the last save was too long ago."""
    ends_early: bool = False
    """True if the training ends after this step."""

    def __post_init__(self) -> None:
        self.saved_at, self.saved_s = self.state.step, self.consensus.elapsed_s

    def begin(self) -> bool:
        """Do what comes before the first step. Returns whether there is a step to be made."""
        state, heartbeat = self.state, self.state.world.heartbeat
        self.log.window.begin()
        heartbeat.step = state.step
        state.forward.train()
        self.evaluate_late()
        if self.stopping.reason() or self.stopping.time_is_up(0.0) or self.parts.ended:
            return False
        if state.step < self.stop:
            self.parts.start()
        heartbeat.enter(Phase.FIRST_STEP)
        return True

    def evaluate_late(self) -> None:
        """Evaluate before the first step, if the run was stopped between a step and its evaluation."""
        step, intervals = self.state.step, self.intervals
        has_ended = self.stopping.time_is_up(0.0) or self.parts.ended  # then it is evaluated, too
        end = step if has_ended else self.stop
        if step and not self.log.latest and intervals.due(intervals.evaluate, step, end):
            self.parts.start()
            self.evaluate(_Due(log=True, save=True, evaluate=True))  # it is logged and saved already

    def before_step(self, micro_batches: Sequence[MicroBatch]) -> _Due:
        """Tell the Parts of the next step. Returns the work that follows it."""
        step, intervals = self.state.step + 1, self.intervals
        if self.stopping.max_time_s is not None and self.stopping.time_is_up(self.consensus.elapsed_s):
            self.stop, self.ends_early = step, True
            self.parts.set_last_step(step)
        logs = intervals.due(intervals.log, step, self.stop)
        evaluates = intervals.due(intervals.evaluate, step, self.stop)
        saves = self.save_is_late or intervals.due(intervals.save, step, self.stop)
        saves = saves or (evaluates and (intervals.save_evaluated or not self.has_evaluated))
        self.parts.before_step(micro_batches)
        return _Due(log=logs, save=saves, evaluate=evaluates)

    def after_step(self, result: StepResult, waited: tuple[Any, Any], due: _Due) -> None:
        """Do all that follows a step.

        Args:
            waited: see `LogWindow.add`.

        Raises:
            Preempted: a rank was asked to stop.
        """
        state, heartbeat = self.state, self.state.world.heartbeat
        heartbeat.step, heartbeat.phase = state.step, Phase.TRAINING
        heartbeat.beats += 1
        self.log.window.add(result, waited)
        self._tell_parts(due)
        if self.consensus() and state.step < self.stop:
            raise Preempted
        if self.parts.agree(now=due.log or self.consensus.ends) and state.step < self.stop:
            due = self.last_step(due)
        if due.save or due.evaluate:
            self.log.window.check_finite()
        if due.save:
            self.save({})
        if due.evaluate:
            self.evaluate(due)
        every_s = self.intervals.save_s
        self.save_is_late = every_s > 0 and self.consensus.elapsed_s - self.saved_s >= every_s

    def _tell_parts(self, due: _Due) -> None:
        """Tell the Parts, and write an entry of the log, if it is due."""
        try:
            self.parts.call("after_step")
        except TrainingError as error:
            _add_to_message(error, self.keeper.kept())
            raise
        if any(due):
            self.keeper.check_place()
        if due.log:
            self.log.window_entry()
        self.log.progress()

    def end(self) -> None:
        """After the last step."""
        self.keeper.finish()
        if self.parts.has_started:
            self.parts.call("end")
            self.log.entry_of_parts()

    def save_unsaved(self) -> None:
        """Save the state if it was not saved after the last step."""
        if self.saved_at < self.state.step:
            self.log.window.check_finite()
            self.save({})

    def save(self, results: dict[str, float]) -> None:
        """Save the state, with the results of the evaluation of this step, if there was any."""
        with self.log.window.excluded(saving=True):
            self.state.strategy.begin_step()
            try:
                self.parts.call("before_save")
            except TrainingError as error:
                _add_to_message(error, self.keeper.kept())
                raise
            with self.parts.apart("saving"):
                self.keeper.save(results)
        self.saved_at, self.saved_s = self.state.step, self.consensus.elapsed_s

    def evaluate(self, due: _Due) -> None:
        """Evaluate after a step. If its results end the training, also do what else follows a last step."""
        with self.log.window.excluded():
            results = self._evaluated(is_saved=due.save)
        self.has_evaluated = True
        is_ended = self.parts.agree(now=True)
        if due.save:
            self.keeper.add_metrics(results)
        self.stopping.add(self.state.step, results)
        self.state.schedule.add(self.state.step, results)
        if (self.stopping.reason() or is_ended) and self.state.step < self.stop:
            self.ends_early = True
            if not due.log:
                self.log.window_entry()
            if not due.save:
                self.save(results)

    def last_step(self, due: _Due) -> _Due:
        """The work that follows a step that a Part makes the last."""
        self.ends_early = True
        if not due.log:
            self.log.window_entry()
        evaluates = self.intervals.evaluate > 0
        return _Due(log=True, save=True, evaluate=evaluates)

    def _evaluated(self, *, is_saved: bool) -> dict[str, float]:
        """Evaluate, and write an entry of the results. If the evaluation fails, the error says what is saved."""
        state, heartbeat = self.state, self.state.world.heartbeat
        phase, begun = heartbeat.phase, time.perf_counter()
        heartbeat.enter(Phase.EVALUATING)
        fail_at("evaluating", state.step)
        try:
            with self.parts.apart("evaluation"):
                values = self.run_evaluation()
        except Exception as error:
            if not is_saved and state.world.size == 1:  # other ranks may not have failed
                with contextlib.suppress(LockstepError):
                    self.save({})
            _add_to_message(error, self.keeper.kept())
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
        f"nothing was learned: all updates were skipped ({number_of(state.step, 'step')}). The checkpoint "
        "holds the initial weights",
        where="end of training",
        remedy=f"{'; or '.join(causes)}. Then start again with --fresh",
    )


def set_training_mode(strategy: Strategy) -> list[str]:
    """Put a model into training mode.

    Returns:
        a note, if a part of the model was in evaluation mode although the whole model was in training mode.
    """
    modes = {name: module for name, module in strategy.unwrapped.model.named_modules() if not module.training}
    strategy.forward.train()
    changed = [name for name, module in modes.items() if module.training]
    if not changed or "" in modes:
        return []
    more = f" and {number_of(len(changed) - 1, 'more module')}" if len(changed) > 1 else ""
    return [
        f"note: Task.model left {changed[0]}{more} in evaluation mode; training puts the whole model into training "
        "mode. To keep a part in evaluation mode, override train() in the model"
    ]
