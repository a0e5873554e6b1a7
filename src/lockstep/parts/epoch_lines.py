"""The lines at the start and end of each epoch, for people who follow a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.data.order import StepPlan
from lockstep.core.errors import number_of
from lockstep.core.loop import Intervals
from lockstep.core.part import Training
from lockstep.core.step import TrainState
from lockstep.parts.entry_line import shown

_COUNTS = ("/samples", "/bad", "/of_samples")  # of each set of evaluation data


class EpochLines(BuiltInPart):
    """A line where an epoch starts, where it ends, and where more parameters start to train.

    Args:
        plan: the samples of each step.
        intervals: when evaluations are due. The line at the end of an epoch follows the evaluation of its last step.
        header: the task's text on an epoch, counted from 0.
        has_lines: whether epochs have lines. Additional parameters always have.
    """

    def __init__(
        self, plan: StepPlan, intervals: Intervals, header: Callable[[int], str], *, has_lines: bool = True
    ) -> None:
        self.plan, self.intervals, self.header, self.has_lines = plan, intervals, header, has_lines

    def start(self, training: Training) -> None:
        assert isinstance(training, Inside)
        training.window.sums_epochs = self.has_lines
        self.begun_at = self.ends_at = training.step
        self.begun = time.perf_counter()
        """The step at which the epoch ends: the number of steps that are then done."""

    def before_step(self, training: Training) -> None:
        assert isinstance(training, Inside)
        done, unfreezing = training.step, training.state.unfreezing
        if done >= self.ends_at:
            self._begin(training, done)
        if unfreezing is not None and done and done in unfreezing.steps:
            training.tell(_new_parameters(training.state, done))

    def after_step(self, training: Training) -> None:
        if training.step == self.ends_at and not self._is_due(training, self.intervals.log):
            self._end_unevaluated(training)

    def log_entry(self, training: Training) -> None:
        if self._is_due(training, self.intervals.log):  # else `after_step` has reported the end
            self._end_unevaluated(training)

    def after_evaluation(self, training: Training) -> None:
        if training.step % self.plan.steps_per_epoch == 0 or training.step == self.ends_at:
            self._end(training, {name: of for name, of in training.results.items() if name.startswith("eval/")})

    def _is_due(self, training: Training, every: int) -> bool:
        return self.intervals.due(every, training.step, training.last_step)

    def _end_unevaluated(self, training: Training) -> None:
        """End the epoch, if this step is its last and no evaluation follows. The line comes after the step's entry."""
        if training.step == self.ends_at and not self._is_due(training, self.intervals.evaluate):
            self._end(training, {})

    def _begin(self, training: Inside, done: int) -> None:
        """An epoch starts with the next step, or resumes there in a resumed run."""
        per_epoch = self.plan.steps_per_epoch
        epoch = done // per_epoch
        if done % per_epoch == 0 and training.window.epoch.steps:  # a checkpoint from before the line of its epoch
            training.window.epoch_results()
        self.ends_at = min((epoch + 1) * per_epoch, training.last_step)
        self.begun_at, self.begun = done, time.perf_counter()
        if not self.has_lines or training.rank:
            return
        header = self.header(epoch)
        is_long = per_epoch >= self.intervals.log  # the start of a short epoch has a line only if it has news
        if is_long or header != (self.header(epoch - 1) if epoch else ""):
            first = epoch * per_epoch
            verb = "starts" if done == first else f"resumes after step {done}"
            rate = f"learning rate {_rate(training.state, done):.4g}"
            parts = [f"steps {first + 1} to {self.ends_at}", rate, header]
            training.tell(f"{self._name(training, epoch)} {verb}: {', '.join(part for part in parts if part)}")

    def _end(self, training: Training, results: Mapping[str, float]) -> None:
        """An epoch has ended after the last step. If lines are wanted, this is a collective.

        Args:
            results: of the evaluation after this step, by name in the log. Empty: there was none.
        """
        assert isinstance(training, Inside)
        if not self.has_lines:
            return
        epoch, parts = (training.step - 1) // self.plan.steps_per_epoch, []
        steps, trained = training.window.epoch_results()
        if trained:
            whole = steps == training.step - epoch * self.plan.steps_per_epoch
            which = "" if whole else f" (of the last {number_of(steps, 'step')})"
            shortly = {name: value for name, value in trained.items() if "/" not in name or name.startswith("loss/")}
            parts.append("train " + ", ".join(f"{name} {value:.4g}" for name, value in shortly.items()) + which)
        names = [name for name in shown(results, results) if not name.endswith(_COUNTS) and "/loss/" not in name]
        if names:
            parts.append("eval " + ", ".join(f"{name.removeprefix('eval/')} {results[name]:.4g}" for name in names))
        is_first = training.step == self.begun_at  # a resumed run evaluates first
        duration = "" if is_first else f" after {time.perf_counter() - self.begun:.1f} s"
        if parts:
            parts.append(f"learning rate {_rate(training.state, training.step - 1):.4g}")
            training.tell(f"{self._name(training, epoch)} ends{duration}: {'; '.join(parts)}")

    def _name(self, training: Training, epoch: int) -> str:
        return f"epoch {epoch + 1} of {-(-training.last_step // self.plan.steps_per_epoch)}"


def _new_parameters(state: TrainState, done: int) -> str:
    """A line on the parameters that start to train after `done` steps: which, how many, and their learning rate."""
    assert state.unfreezing is not None
    patterns, parameters = state.unfreezing.begin(done)
    new = {id(parameter) for parameter in parameters}
    groups = []
    for group in state.optimizer.param_groups:
        count = sum(parameter.numel() for parameter in group["params"] if id(parameter) in new)
        if count:
            rate = group["base_lr"] * state.schedule(done - state.skipped)
            groups.append(f"{count:,} of group {group['name']} at learning rate {rate:.4g}")
    training = [one for one in state.forward.parameters() if one.requires_grad or id(one) in new]
    everything = sum(parameter.numel() for parameter in state.forward.parameters())
    return (
        f"from step {done + 1} on, "
        f"{number_of(sum(one.numel() for one in parameters), 'more parameter', 'trains', 'train')} "
        f"({', '.join(patterns)}): {', '.join(groups)}; "
        f"{sum(one.numel() for one in training):,} of {everything:,} parameters train now"
    )


def _rate(state: TrainState, done: int) -> float:
    """The learning rate of the update after `done` steps, of the first parameter group."""
    updates = max(0, done - state.skipped)  # the step itself may have been skipped
    return float(state.optimizer.param_groups[0]["base_lr"]) * state.schedule(updates)
