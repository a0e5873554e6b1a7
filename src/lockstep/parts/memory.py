"""The memory that each rank holds, by purpose: measured on every rank, logged as figures and as a table."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.core import devices
from lockstep.core.parallel.sharded_tensor import local

if TYPE_CHECKING:
    from lockstep.core.step import TrainState

Row = dict[str, float]
"""The memory of one rank: bytes by column of the table."""

MB = 2**20
RANKS_SHOWN = 16
"""With more ranks, the log has only the largest figure of all ranks, and not a figure for each rank."""
_IMBALANCE = 1.2  # the table reports an imbalance if the largest peak exceeds 1.2 times the smallest
_CHANGE = 0.1  # a second table is shown if a figure changed by more than a tenth

_highest: dict[str, int] = {}  # by device and kind of peak, because resetting the system's peaks loses their values


class MemoryGauge:
    """The memory that this process holds, in bytes: allocated on a device with its own memory, or else resident (RSS).

    Reading does not wait for the device. The peaks are those of the allocator and of the kernel. `reset_peak` resets
    them, so that a part of the run has its own peak. If the system cannot reset the peak, only an increase of the peak
    by a part of the run is visible.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = devices.of(device)

    def current(self) -> int:
        """Bytes held now. If the system does not report it, the most bytes held so far."""
        return self.device.allocated()

    def peak(self) -> int:
        """Most bytes held since `reset_peak`."""
        peak = self.device.peak()
        self._update_highest("peak", peak)
        return peak

    def reset_peak(self) -> int:
        """Begin a new peak. Returns the bytes at which it begins."""
        self.peak(), self.highest_reserved()
        self.device.reset_peak()
        return self.peak()

    def highest_peak(self) -> int:
        """Most bytes held since the process began."""
        return self._update_highest("peak", self.peak())

    def highest_reserved(self) -> int:
        """Most bytes that torch's allocator has reserved on the device since the process began."""
        return self._update_highest("reserved", self.device.reserved_peak())

    def _update_highest(self, kind: str, value: int) -> int:
        key = f"{self.device.device} {kind}"
        _highest[key] = max(_highest.get(key, 0), value)
        return _highest[key]


def mib(size: float) -> float:
    """`size` bytes in MiB, with enough digits to give back the bytes."""
    return round(size / MB, 7)


class MemoryMonitor:
    """Measures the memory of this rank from now on, by purpose. The report has these columns, in bytes:

    parameters: parameters and buffers.
    gradients: gradients, counted after an update and before they are freed.
    optimizer: the optimizer's state.
    activations: the peak of training, less the columns above and `other`; not less than 0. The column includes
        temporary and gathered tensors. On the CPU it also includes memory that the allocator keeps, and memory that
        libraries take in their first step.
    other: on CUDA, everything else that is allocated when the gradients are counted (averages, batches). On the CPU,
        everything that was resident before the training began (interpreter, libraries, data).
    evaluation: the peak of evaluation, above the memory that was held when the evaluation began.
    peak: the most that the process held, for all purposes together, saving included.
    reserved: on CUDA, the most that torch's allocator reserved.

    The first three columns count storages on the device that computes. Views and tied parameters therefore count once,
    and the padding of shards counts.

    Args:
        stop: the last step of the training.
        evaluates: whether an evaluation follows the last step.
    """

    def __init__(self, state: TrainState, *, stop: int, evaluates: bool) -> None:
        self.state, self.stop, self.evaluates, self.gauge = state, stop, evaluates, MemoryGauge(state.world.device)
        self.peak_at_reset = self.gauge.reset_peak()
        before = self.gauge.current()
        self.other = max(0, before - sum(self._count().values()))
        self.peaks: dict[str, int] = {"training": before}
        """Peak of each part of the run, in bytes. Those of `evaluation` and `saving` are above what was held before."""
        self.held: dict[str, tuple[int, int]] = {}
        """Bytes that were held before and after the last time of each part of the run that is not training."""
        self.counted: dict[str, int] = {}
        """The first three columns when last counted. Empty before the first count."""
        self.reported: list[Row] = []
        """The rows of all ranks in the last report."""
        self.hook: RemovableHandle | None = None
        self.has_counted = False
        """True if a count was made since `count_in_next_step`. Then call `stop_counting` after the step."""

    @contextlib.contextmanager
    def apart(self, part: str) -> Generator[None, None, None]:
        """Inside, memory counts for `part` instead of training."""
        self._update_training_peak()
        begin, before = self.gauge.reset_peak(), self.gauge.current()
        try:
            yield
        finally:
            self.held[part] = (before, self.gauge.current())
            self.peaks[part] = max(self.peaks.get(part, 0), self.gauge.peak() - begin)
            self.peak_at_reset = self.gauge.reset_peak()

    def highest_of(self, part: str) -> dict[str, float]:
        """The peak of a part of the run so far, and the memory that was held before and after its last time, in MiB by
        name: the largest of all ranks. All ranks call it."""
        world = self.state.world
        figures = (self.peaks.get(part, 0), *self.held.get(part, (0, 0)))
        by_rank = [0.0] * (world.size * len(figures))
        by_rank[world.rank * len(figures) : (world.rank + 1) * len(figures)] = map(float, figures)
        summed = world.all_sum(by_rank)
        names = (f"memory/{part}_mb", f"memory/before_{part}_mb", f"memory/after_{part}_mb")
        return {name: mib(max(summed[place :: len(figures)])) for place, name in enumerate(names)}

    def _update_training_peak(self) -> None:
        peak = self.gauge.peak()
        if peak > self.peak_at_reset:  # else the peak may be older than the reset, and not the training's
            self.peaks["training"] = max(self.peaks["training"], peak)

    def count_in_next_step(self) -> None:
        """Count the first three columns in the next step, if they have not been counted or the step is the last."""
        if self.hook is None and (not self.counted or self.state.step + 1 == self.stop):
            self.has_counted = False
            self.hook = self.state.optimizer.register_step_post_hook(lambda *_: self._count_after_update())

    def _count_after_update(self) -> None:
        self.counted, self.has_counted = self._count(), True
        # On the CPU a process keeps memory that was freed, so `other` stays the figure from before the training.
        if self.gauge.device.has_own_memory:
            self.other = max(0, self.gauge.current() - sum(self.counted.values()))

    def stop_counting(self) -> None:
        """Stop counting in later steps."""
        self.has_counted = False
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def _count(self) -> dict[str, int]:
        forward, seen = self.state.forward, set[int]()
        parameters = list(forward.parameters())
        by_column = {
            "parameters": [*parameters, *forward.buffers()],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": list(self.state.optimizer.state.values()),
        }
        return {column: _bytes_of(held, self.gauge.device.device.type, seen) for column, held in by_column.items()}

    def report(self, evaluated: bool = False) -> tuple[dict[str, float], list[str]]:
        """The figures for the log, and a table for people. All ranks call it at the same time.

        Call it after each log entry, and with `evaluated` after each evaluation. It reports after the first count. It
        reports again at the end of the run if a figure has changed much. Otherwise it returns nothing.

        Returns:
            figures in MiB by name: the largest of all ranks, and with few ranks also those of each rank; and the lines
            of the table.
        """
        self.stop_counting()  # if no update was applied, the hook has not run
        is_last = self.state.step == self.stop
        if (self.reported and not is_last) or (is_last and self.evaluates and not evaluated):
            return {}, []
        rows = self._gather()
        if not rows or not _differ(self.reported, rows):
            return {}, []
        self.reported = rows
        figures = {f"memory/{name}_mb": mib(max(row[name] for row in rows)) for name in rows[0]}
        if 1 < len(rows) <= RANKS_SHOWN:
            figures |= {f"memory/{name}_mb/rank{rank}": mib(row[name]) for rank, row in enumerate(rows) for name in row}
        return figures, table(rows, self.state.step, self.gauge.device.has_own_memory)

    def line(self) -> str:
        """The most memory that a rank has held so far, as a line for people. All ranks call it at the same time."""
        world, gauge = self.state.world, self.gauge
        by_rank = [0.0] * world.size
        by_rank[world.rank] = float(gauge.highest_peak())
        peaks = world.all_sum(by_rank)
        highest = max(range(world.size), key=peaks.__getitem__)
        what = "allocated on a device" if gauge.device.has_own_memory else "resident"
        others = f", on rank {highest} (least: {min(peaks) / MB:,.0f} MiB)" if world.size > 1 else ""
        return f"memory: at most {peaks[highest] / MB:,.0f} MiB {what}{others}"

    def _gather(self) -> list[Row]:
        """The rows of all ranks, on every rank. Empty if some rank has not counted yet."""
        self._update_training_peak()
        world = self.state.world
        counted = self.counted or self._count()
        row: Row = {
            **counted,
            "activations": max(0, self.peaks["training"] - sum(counted.values()) - self.other),
            "other": self.other,
        }
        if "evaluation" in self.peaks:
            row["evaluation"] = self.peaks["evaluation"]
        row["peak"] = self.gauge.highest_peak()
        if self.gauge.device.has_own_memory:
            row["reserved"] = self.gauge.highest_reserved()
        width = len(row)
        packed = [0.0] * (world.size * width)
        packed[world.rank * width : (world.rank + 1) * width] = row.values()
        ranks_counted, *values = world.all_sum([float(bool(self.counted)), *packed])
        if ranks_counted < world.size:
            return []
        return [dict(zip(row, values[start : start + width], strict=True)) for start in range(0, len(values), width)]


def _bytes_of(values: list[Any], device: str, seen: set[int]) -> int:
    """Bytes of the storages of all tensors in `values` that are on a `device`.

    Args:
        seen: addresses of storages that were counted before. They are not counted again; new addresses are added.
    """
    total = 0
    for tensor in _tensors(values):
        if tensor.device.type != device:
            continue
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a layout or subclass without a storage
            total += tensor.nbytes
            continue
        address = storage.data_ptr()
        total += 0 if address in seen else storage.nbytes()
        if address:  # 0 if the storage has no memory yet, or is on meta: many storages share that address
            seen.add(address)
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors on this rank in `value`, which may be nested, and hold sharded or sparse tensors."""
    if isinstance(value, Tensor):
        plain = local(value.detach())
        whole = plain.coalesce() if plain.is_sparse else plain
        yield from (whole.indices(), whole.values()) if plain.is_sparse else (whole,)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _differ(old: Sequence[Row], new: Sequence[Row]) -> bool:
    if not old or old[0].keys() != new[0].keys():
        return True
    return any(
        abs(after[name] - before[name]) > max(_CHANGE * before[name], MB)
        for before, after in zip(old, new, strict=True)
        for name in after
    )


def table(rows: Sequence[Row], step: int, has_own_memory: bool) -> list[str]:
    """The memory of all ranks as lines for people, in MiB, and a line that names an imbalance between ranks.

    The table has a line for each rank. With many ranks, it has lines for the two ranks with the smallest and the
    largest peak, and for the minimum, the median and the maximum of each column.
    """
    by_peak = sorted(range(len(rows)), key=lambda rank: rows[rank]["peak"])
    lowest, highest = by_peak[0], by_peak[-1]
    shown = {str(rank): rows[rank] for rank in (range(len(rows)) if len(rows) <= RANKS_SHOWN else (lowest, highest))}
    if len(rows) > RANKS_SHOWN:
        for name, choose in (("min", min), ("median", statistics.median), ("max", max)):
            shown[name] = {column: choose(row[column] for row in rows) for column in rows[0]}
    width = max(len(name) for name in [*shown, "rank"])
    lines = [f"memory at step {step} in MiB, {'allocated on the device' if has_own_memory else 'resident'}:"]
    lines.append("  ".join(["rank".rjust(width), *(name.rjust(10) for name in rows[0])]))
    for name, row in shown.items():
        cells = (f"{row[column] / MB:,.1f}".rjust(max(10, len(column))) for column in row)
        lines.append("  ".join([name.rjust(width), *cells]))
    low, high = rows[lowest], rows[highest]
    difference = high["peak"] - low["peak"]
    if high["peak"] > _IMBALANCE * low["peak"]:
        parts = (name for name in high if name not in ("peak", "reserved"))
        column = max(parts, key=lambda name: high[name] - low[name])
        where = "before training, in saving, or in several columns"
        if high[column] - low[column] > difference / 2:
            where = f"mostly in {column}"
        lines.append(f"at its peak, rank {highest} held {difference / MB:,.1f} MiB more than rank {lowest}: {where}")
    return lines
