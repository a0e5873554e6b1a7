"""The steps since the last log entry: their results on all ranks, brought together in one reduction."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.core import devices
from lockstep.core.errors import TrainingError
from lockstep.core.evaluate import combine
from lockstep.core.parallel.world import World
from lockstep.core.step import SAMPLES, StepResult, TrainState
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
        self.begin()
        self._reset_epoch()

    def begin(self) -> None:
        """The training begins: the clocks begin at 0."""
        self.started = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self.results: list[StepResult] = []
        self.in_epoch = 0  # this many of `results` are in the sums of the epoch
        self.waits: list[tuple[Any, Any]] = []  # marks before and after the device waited for the data of a step
        self.begun, self.excluded_s, self.saving_s = time.perf_counter(), 0.0, 0.0

    def _reset_epoch(self) -> None:
        self.epoch_sums: dict[str, float] = {}  # of this rank, by head
        self.epoch_units: dict[str, float] = {}  # of all ranks, by head

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
        sums, units = _losses(self.results)
        fault = self._first_fault()
        unreadable = [message for result in self.results for message in result.bad]
        *here, window_s = self._times()
        by_rank = [0.0] * size * len(here)  # each figure of all ranks, then the next figure of all ranks
        by_rank[rank::size] = here
        sums_here = [_total(values) if self.world.is_group_leader else 0.0 for values in sums.values()]
        has_metrics = self.metrics is not None and self.metrics.has_news()
        packed = [float(fault is not None), float(len(unreadable)), window_s]
        reduced = self.world.all_sum([float(has_metrics), *packed, *by_rank, *sums_here])
        metrics_count, fault_count, unreadable_count, total_s, *rest = reduced
        waits, alone, totals = rest[:size], rest[size : 2 * size], rest[2 * size :]
        if fault_count:
            self._raise_first(fault)
        messages = self._gather_messages(unreadable) if unreadable_count else []
        losses = combine(dict(zip(sums, totals, strict=True)), units, self.coefficients)
        samples = sum(result.samples for result in self.results)
        entry = self.head(state.step)
        entry |= {f"train/{name}": value for name, value in losses.items()}
        if self.metrics is not None:
            results = self.metrics.results() if metrics_count else {}
            entry |= {f"train/{name}": value for name, value in results.items()}
            messages += self.metrics.take_notes()
        entry |= _learning_rates(state.optimizer)
        norm = next((result.grad_norm for result in reversed(self.results) if result.applied), None)
        if norm is not None:  # of the last update
            entry["train/grad_norm"] = float(norm)
        if state.precision.name == "fp16":
            entry["train/loss_scale"] = state.precision.loss_scale
        entry["train/samples_per_s"] = round(samples / max(total_s / size, 1e-9), 1)
        entry["train/wait_share"] = round(sum(waits) / max(total_s, 1e-9), 4)
        entry["train/skipped"] = state.skipped
        entry["time/saving_s"] = round(self.saving_s, 4)
        if unreadable_count:
            entry["data/bad"] = unreadable_count
        self.last = Times(len(self.results), waits, alone, total_s)
        if self.sums_epochs:
            self._add_to_epoch()
        self.reset()
        return entry, messages

    def epoch_results(self) -> dict[str, float]:
        """Close an epoch and begin a new epoch. All ranks call it after the same step, if `sums_epochs`.

        Returns:
            `loss`, and `loss/<head>` if there are several heads: means over the units of all steps since the last
            call, on all ranks. Then the metrics of the same steps. Empty if there was no unit.
        """
        self._add_to_epoch()
        sums, units = self.epoch_sums, self.epoch_units
        self._reset_epoch()
        has_metrics = self.metrics is not None and self.metrics.has_news(epoch=True)
        metrics_count, *totals = self.world.all_sum([float(has_metrics), *sums.values()])
        results = combine(dict(zip(sums, totals, strict=True)), units, self.coefficients)
        if self.metrics is not None and metrics_count:
            results |= self.metrics.results(epoch=True)
        return results

    def _add_to_epoch(self) -> None:
        """Add the steps of this window to the sums of the epoch that do not have them yet."""
        sums, units = _losses(self.results[self.in_epoch :])
        self.in_epoch = len(self.results)
        for head, values in sums.items():
            self.epoch_sums[head] = self.epoch_sums.get(head, 0.0) + _total(values)
            self.epoch_units[head] = self.epoch_units.get(head, 0.0) + units[head]

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
        if not losses or bool(_as_float64([*losses, *norms]).isfinite().all()):
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


def _losses(results: Sequence[StepResult]) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """Sums over some steps: the losses of this rank's micro-batches by head, and the units of all ranks by head."""
    sums: dict[str, list[Tensor]] = {}
    units: dict[str, float] = {}
    for result in results:
        for head in result.totals.keys() - {SAMPLES}:  # a player of a task may have no turn in these steps
            sums.setdefault(head, [])
            units.setdefault(head, 0.0)
        for by_head, counts in zip(result.losses, result.counted, strict=False):
            for head, value in by_head.items():
                sums.setdefault(head, []).extend([value] if counts else [])
        for head in dict.fromkeys(head for by_head in result.losses for head in by_head):
            units[head] = units.get(head, 0.0) + result.totals.get(head, result.totals.get(SAMPLES, 0.0))
    return {head: sums[head] for head in sorted(sums)}, units  # sorted: the same order on every rank


def _learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The learning rate of the first parameter group; with several groups, also the rate of each group."""
    rates = {str(group["name"]): float(group["lr"]) for group in optimizer.param_groups}
    entry = {"train/lr": next(iter(rates.values()))}
    if len(rates) > 1:
        entry |= {f"train/lr/{name}": rate for name, rate in rates.items()}
    return entry


def _total(values: list[Tensor]) -> float:
    return float(_as_float64(values).sum()) if values else 0.0


def _as_float64(values: list[Tensor]) -> Tensor:
    """Scalars as one tensor of float64: on the device of the first of them, or on the CPU if it has no float64.

    With offloaded parameters, losses are on the GPU and norms of gradients on the CPU.
    """
    place = values[0].device
    if not devices.of(place).has_float64:
        return torch.stack([value.float() for value in values]).cpu().double()
    return torch.stack([value.double().to(place) for value in values])
