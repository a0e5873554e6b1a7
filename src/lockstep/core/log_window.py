"""The steps since the last log entry: their results on all ranks, brought together in one reduction."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lockstep.core import devices
from lockstep.core.errors import TrainingError
from lockstep.core.loss_sums import LossSums, as_float64
from lockstep.core.parallel.world import World
from lockstep.core.step import StepResult, TrainState
from lockstep.core.train_metrics import TrainMetrics


class _Fault(NamedTuple):
    """A loss or gradient norm that is not finite."""

    step: int
    what: str
    where: str


class Times(NamedTuple):
    """The seconds of some steps."""

    steps: int
    waits: list[float]
    """By rank: waiting for data."""
    alone: list[float]
    """By rank: computing before gradients were exchanged. 0 if this is unknown."""
    total: float
    """The sum over ranks of all seconds of these steps."""


class LogWindow:
    """Collects the results of steps without waiting for the device. `entry` reads the results and reduces them."""

    def __init__(
        self, world: World, coefficients: Mapping[str, float], steps_per_epoch: int, metrics: TrainMetrics | None = None
    ) -> None:
        self.world, self.coefficients, self.steps_per_epoch = world, coefficients, steps_per_epoch
        self.metrics = metrics
        self.device = devices.of(world.device)
        self.last = Times(0, [], [], 0.0)
        """The times of the steps of the last entry."""
        self.sums_epochs, self.is_excluding = False, False
        """True if `epoch_results` will be called."""
        self.epoch = LossSums(world)
        self.reset()
        self.begin()

    def begin(self) -> None:
        """The training begins: the clocks begin at 0."""
        self.started = self.begun = time.perf_counter()
        self.excluded_s = self.saving_s = 0.0

    def reset(self) -> None:
        """Begin a new window."""
        self.results: list[StepResult] = []
        self.added = 0  # this many of `results` are in the sums
        self.sums = LossSums(self.world)
        self.norm_before: float | None = None
        """The norm of the last update before `results`, in an earlier process."""
        self.bad_before = 0  # the number of unreadable samples there
        self.waits: list[tuple[Any, Any]] = []  # marks before and after the device waited for the data of a step
        self.begun, self.excluded_s, self.saving_s = time.perf_counter(), 0.0, 0.0

    def add(self, result: StepResult, waited: tuple[Any, Any]) -> None:
        """Add a step.

        Args:
            waited: marks of the device, see `Device.mark`: before the host asked for the step's data, and when the
                data were there.
        """
        self.results.append(result)
        self.waits.append(waited)

    @contextlib.contextmanager
    def excluded(self, saving: bool = False) -> Generator[None, None, None]:
        """Inside, time does not count as time of training: for evaluations, saves and the count of operations.

        The host may be ahead of the device. So it waits at the beginning for the steps before, whose time counts, and
        at the end for all that was queued inside.

        Args:
            saving: whether the state is saved inside. The entry says how long that took.
        """
        if self.is_excluding:  # the time counts once
            yield
            return
        self.device.wait_for(self.device.mark())
        begun, self.is_excluding = time.perf_counter(), True
        try:
            yield
            self.device.wait_for(self.device.mark())
        finally:
            passed, self.is_excluding = time.perf_counter() - begun, False
            self.excluded_s += passed
            self.saving_s += passed if saving else 0.0

    def _times(self) -> tuple[float, float, float]:
        """Seconds since the window began: waiting for data, computing before gradients were exchanged, and in total.

        Called after the losses were read. Before that, the host may be ahead of the device: a step that the host has
        queued is not done, and while the host waits for data, the device may still compute.
        """
        if self.waits:  # there may have been no loss to read
            self.device.wait_for(self.waits[-1][1])
        waits = [self.device.seconds_between(before, after) for before, after in self.waits]
        alone = sum(self._alone_s(result) for result in self.results)
        return sum(waits), alone, time.perf_counter() - self.begun - self.excluded_s

    def _alone_s(self, result: StepResult) -> float:
        """Seconds that this rank computed in a step before gradients were exchanged; 0 if this is unknown."""
        if len(result.marks) != 2 or result.waits is None:
            return 0.0
        waits = sum(self.device.seconds_between(*marks) for marks in result.waits)
        return max(0.0, self.device.seconds_between(*result.marks) - waits)

    def head(self, step: int) -> dict[str, float]:
        """The figures with which each entry of the log begins: the step, the epoch and the seconds so far."""
        elapsed_s = round(time.perf_counter() - self.started, 3)
        return {"step": step, "epoch": round(step / self.steps_per_epoch, 4), "time_s": elapsed_s}

    def entry(self, state: TrainState) -> tuple[dict[str, float], list[str]]:
        """Close the window and begin a new window. All ranks call it after the same step.

        Returns:
            the log entry, equal on all ranks; and messages about unreadable samples, on rank 0.

        Raises:
            TrainingError: a loss or gradient in the window was not finite; names the step, the rank and the samples.
        """
        size, rank = self.world.size, self.world.rank
        self._add()
        fault = self._first_fault()
        unreadable = [message for result in self.results for message in result.bad]
        *here, window_s = self._times()
        by_rank = [0.0] * size * len(here)  # each figure of all ranks, then the next figure of all ranks
        by_rank[rank::size] = here
        has_metrics = self.metrics is not None and self.metrics.has_news()
        packed = [float(fault is not None), float(len(unreadable) + self.bad_before), window_s]
        reduced = self.world.all_sum([float(has_metrics), *packed, *by_rank, *self.sums.slots()])
        metrics_count, fault_count, unreadable_count, total_s, *rest = reduced
        waits, alone, slots = rest[:size], rest[size : 2 * size], rest[2 * size :]
        if fault_count:
            self._raise_first(fault)
        messages = self._gather_messages(unreadable) if unreadable_count else []
        losses = self.sums.means(slots, self.coefficients)
        samples = sum(result.samples for result in self.results)
        entry = self.head(state.step)
        entry |= {f"train/{name}": value for name, value in losses.items()}
        if self.metrics is not None:
            results = self.metrics.results() if metrics_count else {}
            entry |= {f"train/{name}": value for name, value in results.items()}
            messages += self.metrics.take_notes()
        entry |= _learning_rates(state.optimizer)
        if (norm := self._norm()) is not None:
            entry["train/grad_norm"] = norm
        if state.precision.name == "fp16":
            entry["train/loss_scale"] = state.precision.loss_scale
        entry["train/samples_per_s"] = round(samples / max(total_s / size, 1e-9), 1)
        entry["train/wait_share"] = round(sum(waits) / max(total_s, 1e-9), 4)
        entry["train/skipped"] = state.skipped
        entry["time/saving_s"] = round(self.saving_s, 4)
        if unreadable_count:
            entry["data/bad"] = unreadable_count
        self.last = Times(len(self.results), waits, alone, total_s)
        self.reset()
        return entry, messages

    def _norm(self) -> float | None:
        """The norm of the gradient of the last update; None if it was not computed."""
        last = next((result for result in reversed(self.results) if result.applied), None)
        if last is None:
            return self.norm_before
        return None if last.grad_norm is None else float(last.grad_norm)

    def epoch_results(self) -> tuple[int, dict[str, float]]:
        """Close an epoch and begin a new epoch. All ranks call it after the same step, if `sums_epochs`.

        Returns:
            the number of steps since the last call. And `loss`, and `loss/<head>` if there are several heads: means
            over the units of these steps, on all ranks; then their metrics. Empty if there was no unit.
        """
        self._add()
        sums, self.epoch = self.epoch, LossSums(self.world)
        has_metrics = self.metrics is not None and self.metrics.has_news(epoch=True)
        metrics_count, *slots = self.world.all_sum([float(has_metrics), *sums.slots()])
        results = sums.means(slots, self.coefficients)
        if self.metrics is not None and metrics_count:
            results |= self.metrics.results(epoch=True)
        return sums.steps, results

    def _add(self) -> None:
        """Add the steps to the sums that are not in them yet."""
        new, self.added = self.results[self.added :], len(self.results)
        self.sums.add(new)
        if self.sums_epochs:
            self.epoch.add(new)

    def saved(self) -> dict[str, Any]:
        """The steps since the last entry and in this epoch, for a checkpoint, as JSON; on rank 0. A collective.

        With it, the next entry of a resumed run has the same bits as that of a run that was not stopped.
        """
        self._add()
        if not self.sums.steps and not self.epoch.steps:
            return {}
        unreadable = sum(len(result.bad) for result in self.results) + self.bad_before
        found = {"entry": self.sums.saved(), "epoch": self.epoch.saved(), "grad_norm": self._norm()}
        found["bad"] = self.world.all_sum([unreadable])[0]
        if self.metrics is not None:
            found["metrics"] = self.metrics.saved(with_epoch=self.sums_epochs)
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what `saved` returned, before the first step. Empty: the checkpoint has nothing of it."""
        if saved:
            self.sums.restore(saved["entry"])
            self.epoch.restore(saved["epoch"])
            self.norm_before = saved["grad_norm"]
            self.bad_before = int(saved["bad"]) if self.world.rank == 0 else 0
            if self.metrics is not None:
                self.metrics.restore(saved.get("metrics", []))

    def check_finite(self) -> None:
        """Check the losses and gradients since the last entry. All ranks call it after the same step.

        Raises:
            TrainingError: a loss or gradient was not finite; names the step, the rank and the samples.
        """
        fault = self._first_fault()
        if self.world.all_sum([float(fault is not None)])[0]:
            self._raise_first(fault)

    def _first_fault(self) -> _Fault | None:
        """The first loss or gradient norm on this rank that is not finite."""
        losses = [loss for result in self.results for by_head in result.losses for loss in by_head.values()]
        norms = [result.grad_norm for result in self.results if result.grad_norm is not None and result.applied]
        # One tensor for all, so that the device is read once.
        if not losses or bool(as_float64([*losses, *norms]).isfinite().all()):
            return None
        for result in self.results:
            for indices, by_head in zip(result.indices, result.losses, strict=False):
                for head, loss in by_head.items():
                    if not bool(loss.isfinite()):
                        name = "loss" if head == "loss" else f"loss {head!r}"
                        where = f"rank {self.world.rank}, samples {list(indices)}"
                        return _Fault(result.step, f"the {name} is {float(loss)}", where)
            norm = result.grad_norm
            if norm is not None and result.applied and not bool(norm.isfinite()):
                where = "all ranks (the gradient is global)"
                return _Fault(result.step, f"the gradient norm is {float(norm)}", where)
        return None

    def _raise_first(self, own_fault: _Fault | None) -> None:
        """Raise the earliest fault of all ranks, on all ranks."""
        gathered = self.world.broadcast(self.world.gather(own_fault))
        faults = sorted(fault for fault in gathered if fault is not None)
        first = [fault for fault in faults if fault.step == faults[0].step]
        remedy = "lower optim.lr, set optim.clip_norm, lengthen schedule.warmup_steps, or use precision=fp32"
        if any("samples" in fault.where for fault in first):
            remedy = f"look at these samples; else {remedy}"
        places = "; ".join(dict.fromkeys(fault.where for fault in first))
        raise TrainingError(
            "; ".join(dict.fromkeys(fault.what for fault in first)),
            where=f"step {first[0].step + 1}, {places}",
            remedy=f"{remedy}. Nothing was saved since that step",
        )

    def _gather_messages(self, messages: list[str]) -> list[str]:
        """The messages of all ranks, each once, on rank 0. Empty on other ranks."""
        gathered = self.world.gather(messages)
        return [] if gathered is None else list(dict.fromkeys(message for rank in gathered for message in rank))


def _learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The learning rate of the first parameter group; with several groups, also the rate of each group."""
    rates = {str(group["name"]): float(group["lr"]) for group in optimizer.param_groups}
    entry = {"train/lr": next(iter(rates.values()))}
    if len(rates) > 1:
        entry |= {f"train/lr/{name}": rate for name, rate in rates.items()}
    return entry
