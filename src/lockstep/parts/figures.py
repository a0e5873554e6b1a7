"""The Parts that add figures to the log: memory, times of the ranks, floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.data.loader import Loader, MicroBatch
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.part import Training
from lockstep.parts import health
from lockstep.parts.flops import FlopCount
from lockstep.parts.health import Health
from lockstep.parts.memory import RANKS_SHOWN, MemoryMonitor, mib


class Memory(BuiltInPart):
    """The memory that each rank holds, by purpose.

    Args:
        evaluates: whether an evaluation follows the last step.
        shows_tables: whether to show tables of the memory by rank and purpose, in addition to a line at the end.
    """

    def __init__(self, *, evaluates: bool, shows_tables: bool) -> None:
        self.evaluates, self.shows_tables = evaluates, shows_tables

    def start(self, training: Training) -> None:
        assert isinstance(training, Inside)
        self.monitor = MemoryMonitor(training.state, stop=training.last_step, evaluates=self.evaluates)
        self.monitor.count_in_next_step()

    def after_step(self, training: Training) -> None:
        if self.monitor.has_counted:
            self.monitor.stop_counting()
        if training.step + 1 == training.last_step:
            self.monitor.count_in_next_step()

    def log_entry(self, training: Training) -> None:
        assert isinstance(training, Inside)
        gauge, world = self.monitor.gauge, training.state.world
        by_rank = [0.0] * (2 * world.size)
        by_rank[world.rank], by_rank[world.size + world.rank] = map(
            mib, (gauge.highest_peak(), gauge.highest_reserved())
        )
        of_ranks = world.all_sum(by_rank)
        peaks, reserved = of_ranks[: world.size], of_ranks[world.size :]
        training.log("memory/peak_mb", max(peaks))
        if 1 < world.size <= RANKS_SHOWN:
            _log(training, {f"memory/peak_mb/rank{rank}": peak for rank, peak in enumerate(peaks)})
        if gauge.device.has_own_memory:
            training.log("memory/reserved_mb", max(reserved))
        self._report(training, evaluated=False)

    def after_evaluation(self, training: Training) -> None:
        self._report(training, evaluated=True)
        _log(training, self.monitor.highest_of("evaluation"))

    def _report(self, training: Training, *, evaluated: bool) -> None:
        figures, lines = self.monitor.report(evaluated=evaluated)
        _log(training, figures)
        for line in lines if self.shows_tables else ():
            training.tell(line)
        self.monitor.count_in_next_step()  # if no step so far had an update, or the next step is the last

    def apart(self, what: str) -> AbstractContextManager[None]:
        return self.monitor.apart(what)

    def end(self, training: Training) -> None:
        training.tell(self.monitor.line())


class RankTimes(BuiltInPart):
    """The time of each rank before gradients are exchanged, and the rank that the others wait for."""

    def start(self, training: Training) -> None:
        assert isinstance(training, Inside)
        self.health = Health(training.state.world.nodes)

    def log_entry(self, training: Training) -> None:
        assert isinstance(training, Inside)
        times = training.window.last
        if times.steps:
            _log(training, health.figures(times.alone, times.waits, steps=times.steps, shown=RANKS_SHOWN))
            total_s = times.total / training.ranks
            _tell(training, self.health.look(times.alone, times.waits, steps=times.steps, total_s=total_s))


class Operations(BuiltInPart):
    """The floating-point operations per second of the training; see `FlopCount`.

    Args:
        compiled: whether `torch.compile` was applied to the model.
        loader: reads a few samples again if the model is compiled or sharded: a counted pass runs the code as written,
        and could need more memory than a step.
    """

    def __init__(self, *, compiled: bool, loader: Loader) -> None:
        self.compiled, self.loader = compiled, loader

    def start(self, training: Training) -> None:
        assert isinstance(training, Inside)
        state = training.state
        self.count = FlopCount(state.strategy, state.precision, state.world, compiled=self.compiled)
        self.has_batch, self.kernels = False, ""

    def after_step(self, training: Training) -> None:
        assert isinstance(training, Inside)
        if training.window.results[-1].losses:
            self.count.add(training.micro_batches)
            self.has_batch = True  # the same on all ranks, even if this rank has only fillers

    def log_entry(self, training: Training) -> None:
        assert isinstance(training, Inside)
        state, total_s = training.state, training.window.last.total
        if self.has_batch:
            with training.window.excluded():
                few = self.compiled or state.world.size > 1
                self.count.count(training.micro_batches[0], self._few if few else None)
            kernels = ", ".join(f"{name} ({times} calls)" for name, times in self.count.attention.items())
            if kernels and kernels != self.kernels:
                training.tell(f"attention: torch's kernels {kernels} in a forward pass")
                self.kernels = kernels
        own = self.count.take()
        operations, unknown = state.world.all_sum([own or 0.0, float(own is None)])
        if unknown:
            return
        rate = operations / max(total_s, 1e-9)  # of one rank: `total_s` is the time of all ranks together
        training.log("train/tflops_per_s", float(f"{rate / 1e12:.4g}"))
        peak = self.count.peak(training.window.device.name())
        if peak is not None:
            training.log("train/mfu", float(f"{rate / peak:.4g}"))

    def _few(self, micro_batch: MicroBatch) -> MicroBatch:
        """The first two samples of a micro-batch, because BatchNorm cannot take one."""
        plan = MicroBatchPlan(micro_batch.indices[:2], micro_batch.epoch, micro_batch.filler)
        few = self.loader.micro_batches[plan]
        few.copy = self.loader.copies.begin
        return few


def _log(training: Training, figures: dict[str, float]) -> None:
    for name, value in figures.items():
        training.log(name, value)


def _tell(training: Training, lines: Sequence[str]) -> None:
    for line in lines:
        training.tell(line)
