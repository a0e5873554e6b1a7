"""The lines at the beginning and at the end of each epoch, for people who follow a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.core.data.order import StepPlan
from lockstep.core.log_window import LogWindow
from lockstep.core.step import TrainState

if TYPE_CHECKING:
    from lockstep.core.writer import Writer

_COUNTS = ("/samples", "/bad", "/of_samples")  # of each set of evaluation data


class EpochLog:
    """Knows where epochs begin and end, and writes a line at each of these places, where lines are wanted.

    All ranks call its methods after the same steps. Only ranks with writers make the text.

    Args:
        stop: step at which the training ends.
        lines: whether lines are wanted.
        header: what the task says about an epoch, counted from 0.
    """

    def __init__(
        self,
        state: TrainState,
        window: LogWindow,
        plan: StepPlan,
        *,
        stop: int,
        lines: bool,
        header: Callable[[int], str],
        writers: Sequence[Writer],
    ) -> None:
        self.state, self.window, self.plan, self.stop = state, window, plan, stop
        self.lines, self.header, self.writers = lines, header, writers
        window.sums_epochs = lines
        self.begun_at, self.begun = state.step, time.perf_counter()
        self.ends_at = state.step
        """The step at which the epoch ends: the number of steps that are then done."""

    def begin(self) -> None:
        """An epoch begins with the next step, or goes on there in a resumed run."""
        state, per_epoch = self.state, self.plan.steps_per_epoch
        epoch = state.step // per_epoch
        self.ends_at = min((epoch + 1) * per_epoch, self.stop)
        self.begun_at, self.begun = state.step, time.perf_counter()
        if self.lines and self.writers:
            first = epoch * per_epoch
            verb = "begins" if state.step == first else f"goes on after step {state.step}"
            parts = [
                f"steps {first + 1} to {self.ends_at}",
                f"learning rate {_next_rate(state):.4g}",
                self.header(epoch),
            ]
            self._tell(f"{self._name(epoch)} {verb}: {', '.join(part for part in parts if part)}")

    def begin_phase(self) -> None:
        """Parameters begin to train with the next step: say which, how many, and how quickly each group learns."""
        state = self.state
        if state.unfreezing is None or not self.writers:
            return
        patterns, parameters = state.unfreezing.begin(state.step)
        new, factor = {id(parameter) for parameter in parameters}, state.schedule(state.step - state.skipped)
        groups = []
        for group in state.optimizer.param_groups:
            count = sum(parameter.numel() for parameter in group["params"] if id(parameter) in new)
            if count:
                rate = group["base_lr"] * factor
                groups.append(f"{count:,} of group {group['name']} at learning rate {rate:.4g}")
        training = [one for one in state.forward.parameters() if one.requires_grad or id(one) in new]
        everything = sum(parameter.numel() for parameter in state.forward.parameters())
        self._tell(
            f"from step {state.step + 1} on, {sum(one.numel() for one in parameters):,} more parameters train "
            f"({', '.join(patterns)}): {', '.join(groups)}; "
            f"{sum(one.numel() for one in training):,} of {everything:,} parameters train now"
        )

    def end(self, results: Mapping[str, float]) -> None:
        """An epoch has ended after the last step. Where lines are wanted, this is a collective.

        Args:
            results: of the evaluation after this step, by their names in the log. Empty: there was none.
        """
        if not self.lines:
            return
        trained = self.window.epoch_results()
        steps = self.state.step - self.begun_at  # 0: a resumed run evaluates first
        if not self.writers:
            return
        parts = []
        if steps and trained:
            whole = self.begun_at % self.plan.steps_per_epoch == 0
            which = "" if whole else f" (of the last {steps} steps)"
            shortly = {name: value for name, value in trained.items() if "/" not in name or name.startswith("loss/")}
            parts.append("train " + ", ".join(f"{name} {value:.4g}" for name, value in shortly.items()) + which)
        shown = {name: value for name, value in results.items() if not name.endswith(_COUNTS) and "/loss/" not in name}
        if shown:
            parts.append("eval " + ", ".join(f"{name.removeprefix('eval/')} {shown[name]:.4g}" for name in shown))
        duration = f" after {time.perf_counter() - self.begun:.1f} s" if steps else ""
        if parts:
            epoch = (self.state.step - 1) // self.plan.steps_per_epoch
            self._tell(f"{self._name(epoch)} ends{duration}: {'; '.join(parts)}")

    def _name(self, epoch: int) -> str:
        return f"epoch {epoch + 1} of {-(-self.stop // self.plan.steps_per_epoch)}"

    def _tell(self, text: str) -> None:
        for writer in self.writers:
            writer.message(text)


def _next_rate(state: TrainState) -> float:
    """The learning rate of the next update, of the first parameter group."""
    return float(state.optimizer.param_groups[0]["base_lr"]) * state.schedule(state.step - state.skipped)
