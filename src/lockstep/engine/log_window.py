"""What happened since the last log entry, over all ranks, in one reduction."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.engine.evaluate import combine
from lockstep.engine.memory_gauge import MemoryGauge, mib
from lockstep.engine.step import SAMPLES, StepResult, TrainState
from lockstep.errors import TrainingError

RANKS_SHOWN = 16  # beyond, only the largest memory figures are entries


class LogWindow:
    """Collects the results of steps without touching the device; `entry` reads and reduces them."""

    def __init__(self, world: World, coefficients: Mapping[str, float], steps_per_epoch: int) -> None:
        self.world, self.coefficients, self.steps_per_epoch = world, coefficients, steps_per_epoch
        self.gauge = MemoryGauge(world.device)
        self.started = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self.results: list[StepResult] = []
        self.wait_s = self.step_s = 0.0

    def add(self, result: StepResult, wait_s: float, step_s: float) -> None:
        """Take in a step: `wait_s` of waiting for its data, `step_s` of computing."""
        self.results.append(result)
        self.wait_s += wait_s
        self.step_s += step_s

    def entry(self, state: TrainState) -> tuple[dict[str, float], list[str]]:
        """The log entry of the window, equal on all ranks, and what must be told of unreadable samples.

        Every rank calls it at the same step. Begins a new window.

        Raises:
            TrainingError: a loss or gradient in the window was not finite; names step, rank and samples.
        """
        sums: dict[str, list[Tensor]] = {}
        units: dict[str, float] = {}
        for o in self.results:
            for by_head, counts in zip(o.losses, o.counted, strict=False):
                for head, value in by_head.items():
                    sums.setdefault(head, []).extend([value] if counts else [])
            for head in o.losses[0] if o.losses else ():
                units[head] = units.get(head, 0.0) + o.totals.get(head, o.totals.get(SAMPLES, 0.0))
        sums = {head: sums[head] for head in sorted(sums)}  # as on every rank
        fault = self._first_fault()
        bad = [message for o in self.results for message in o.bad if self.world.counts_samples]
        size, rank = self.world.size, self.world.rank
        memory = [0.0] * 2 * size
        memory[rank], memory[size + rank] = mib(self.gauge.most()), mib(self.gauge.reserved())
        packed = [
            float(fault is not None),
            float(len(bad)),
            self.wait_s,
            self.wait_s + self.step_s,
            *memory,
            *(_total(values) if self.world.counts_samples else 0.0 for values in sums.values()),
        ]
        faults, bad_count, wait_s, total_s, *rest = self.world.all_sum(packed)
        peaks, reserved, totals = rest[:size], rest[size : 2 * size], rest[2 * size :]
        if faults:
            self._raise_first(fault)
        told = self._collect(bad) if bad_count else []
        losses = combine(dict(zip(sums, totals, strict=True)), units, self.coefficients)
        entry: dict[str, float] = {"step": state.step, "epoch": round(state.step / self.steps_per_epoch, 4)}
        entry["time_s"] = round(time.perf_counter() - self.started, 3)
        entry |= {f"train/{name}": value for name, value in losses.items()}
        rates = {str(group["name"]): float(group["lr"]) for group in state.optimizer.param_groups}
        entry["train/lr"] = next(iter(rates.values()))
        if len(rates) > 1:
            entry |= {f"train/lr/{name}": rate for name, rate in rates.items()}
        norm = next((o.grad_norm for o in reversed(self.results) if o.applied), None)  # of the last update, or of none
        if norm is not None:
            entry["train/grad_norm"] = float(norm)
        if state.precision.name == "fp16":
            entry["train/loss_scale"] = state.precision.loss_scale
        seconds = total_s / size
        entry["train/samples_per_s"] = round(sum(o.samples for o in self.results) / max(seconds, 1e-9), 1)
        entry["train/wait_share"] = round(wait_s / max(total_s, 1e-9), 4)
        entry["train/skipped"] = state.skipped
        if bad_count:
            entry["data/bad"] = bad_count
        entry["memory/peak_mb"] = max(peaks)
        if 1 < size <= RANKS_SHOWN:
            entry |= {f"memory/peak_mb/rank{rank}": value for rank, value in enumerate(peaks)}
        if self.world.device.type == "cuda":
            entry["memory/reserved_mb"] = max(reserved)
        self.reset()
        return entry, told

    def check_finite(self) -> None:
        """Raise where a loss since the last entry was not finite. Every rank calls it at the same step."""
        fault = self._first_fault()
        if self.world.all_sum([float(fault is not None)])[0]:
            self._raise_first(fault)

    def _first_fault(self) -> tuple[int, str, str] | None:
        """(step, what, where) of the first loss or gradient norm on this rank that is not finite."""
        losses = [loss for o in self.results for by_head in o.losses for loss in by_head.values()]
        norms = [o.grad_norm for o in self.results if o.grad_norm is not None and o.applied]
        if not losses or bool(torch.stack([value.double() for value in (*losses, *norms)]).isfinite().all()):
            return None
        for o in self.results:
            for indices, by_head in zip(o.indices, o.losses, strict=False):
                for head, loss in by_head.items():
                    if not bool(loss.isfinite()):
                        name = "loss" if head == "loss" else f"loss {head!r}"
                        return (
                            o.step,
                            f"the {name} is {float(loss)}",
                            f"rank {self.world.rank}, samples {list(indices)}",
                        )
            if o.grad_norm is not None and o.applied and not bool(o.grad_norm.isfinite()):
                return o.step, f"the gradient norm is {float(o.grad_norm)}", "all ranks (the gradient is global)"
        return None

    def _raise_first(self, mine: tuple[int, str, str] | None) -> None:
        gathered = self.world.broadcast(self.world.gather(mine))
        faults = sorted(fault for fault in gathered if fault is not None)
        first = [fault for fault in faults if fault[0] == faults[0][0]]
        raise TrainingError(
            "; ".join(dict.fromkeys(fault[1] for fault in first)),
            where=f"step {first[0][0] + 1}, " + "; ".join(dict.fromkeys(fault[2] for fault in first)),
            remedy=("look at these samples; else " if any("samples" in fault[2] for fault in first) else "")
            + "lower optim.lr, set optim.clip_norm, lengthen schedule.warmup_steps, or use precision=fp32. Nothing was saved since",
        )

    def _collect(self, bad: list[str]) -> list[str]:
        gathered = self.world.gather(bad)
        return [] if gathered is None else list(dict.fromkeys(message for rank in gathered for message in rank))


def _total(values: list[Tensor]) -> float:
    return float(torch.stack(values).double().sum()) if values else 0.0
