"""Who holds how much memory, and for what: measured on every rank, shown beside each other."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.distributed.sharded_tensor import local
from lockstep.engine.log_window import RANKS_SHOWN
from lockstep.engine.memory_gauge import MB, MemoryGauge, mib
from lockstep.engine.step import TrainState

P = ParamSpec("P")
T = TypeVar("T")
Row = dict[str, float]  # bytes, by column

_IMBALANCE = 1.2  # largest peak over smallest, from which on it is told
_CHANGE = 0.1  # share of itself by which a figure must change to be told again


class Memory:
    """What this rank holds for what, and how much at most, from now on; of tensors, those on the device that computes.

    parameters (with buffers), gradients, optimizer (its state): bytes of the real tensors, after an update and before the
        gradients are let go of; storages, so that views and ties count once, and padding of shards counts.
    other: all else. On CUDA what is allocated besides at that moment (averages, batches); on the CPU what was resident before
        the training began (interpreter, libraries, data).
    activations: most held in training, less all of these. With temporary and gathered tensors; on the CPU also what the
        allocator keeps and what libraries take in their first step. Not less than 0.
    evaluation: what it took at most on top of what was held when it began.
    peak, reserved: as `MemoryGauge.most` and `MemoryGauge.reserved`; with everything, also saving.

    Args:
        stop: the last step. evaluates: whether an evaluation follows it.
    """

    def __init__(self, state: TrainState, stop: int, evaluates: bool) -> None:
        self.state, self.stop, self.evaluates, self.gauge = state, stop, evaluates, MemoryGauge(state.world.device)
        self.begun = self.gauge.restart()
        before = self.gauge.held()
        self.other = max(0, before - sum(self._count().values()))
        self.tops: dict[str, int] = {"training": before}
        self.counted: dict[str, int] = {}
        self.shown: list[Row] = []
        self.hook: RemovableHandle | None = None

    def during(self, part: str, call: Callable[P, T]) -> Callable[P, T]:
        """`call`, with its memory measured as `part` and apart from the training's."""

        def measured(*arguments: P.args, **options: P.kwargs) -> T:
            with self._apart(part):
                return call(*arguments, **options)

        return measured

    @contextlib.contextmanager
    def _apart(self, part: str) -> Generator[None, None, None]:
        self._note_training()
        begun = self.gauge.restart()
        try:
            yield
        finally:
            self.tops[part] = max(self.tops.get(part, 0), self.gauge.peak() - begun)
            self.begun = self.gauge.restart()

    def _note_training(self) -> None:
        peak = self.gauge.peak()
        if peak > self.begun:  # else the mark may be that of what came before
            self.tops["training"] = max(self.tops["training"], peak)

    def count_in_next_step(self) -> None:
        """Before a step that logs, or its repetition: count in it, where that was not done yet or it is the last."""
        if self.hook is None and (not self.counted or self.state.step + 1 == self.stop):
            self.hook = self.state.optimizer.register_step_post_hook(lambda *_: self._measure())

    def _measure(self) -> None:
        self.counted = self._count()
        if (
            self.gauge.device.type == "cuda"
        ):  # exact, while a process keeps what it was given: there the beginning must do
            self.other = max(0, self.gauge.held() - sum(self.counted.values()))

    def _count(self) -> dict[str, int]:
        forward, seen = self.state.forward, set[int]()
        parameters = list(forward.parameters())
        found = {
            "parameters": [*parameters, *forward.buffers()],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": list(self.state.optimizer.state.values()),
        }
        return {name: _size(tensors, self.gauge.device.type, seen) for name, tensors in found.items()}

    def report(self, evaluated: bool = False) -> tuple[dict[str, float], list[str]]:
        """Entries (MiB: the largest of all ranks, and each rank's where they are few) and a table for people. All ranks call it.

        Called after each log entry, and after each evaluation with `evaluated`. Both are empty but after the first count, and
        at the end of the run where there is notable news.
        """
        if self.hook is not None:
            self.hook.remove()  # an update that was skipped has not called it
            self.hook = None
        last = self.state.step == self.stop
        if (self.shown and not last) or (last and self.evaluates and not evaluated):
            return {}, []
        rows = self._gather()
        if not rows or not _differ(self.shown, rows):
            return {}, []
        self.shown = rows
        entries = {f"memory/{name}_mb": mib(max(row[name] for row in rows)) for name in rows[0]}
        if 1 < len(rows) <= RANKS_SHOWN:
            entries |= {f"memory/{name}_mb/rank{rank}": mib(row[name]) for rank, row in enumerate(rows) for name in row}
        return entries, table(rows, self.state.step, self.gauge.device.type)

    def _gather(self) -> list[Row]:
        """The row of each rank, on every rank; none where some rank has not counted."""
        self._note_training()
        world = self.state.world
        counted = self.counted or self._count()
        mine: Row = {
            **counted,
            "activations": max(0, self.tops["training"] - sum(counted.values()) - self.other),
            "other": self.other,
        }
        if "evaluation" in self.tops:
            mine["evaluation"] = self.tops["evaluation"]
        mine["peak"] = self.gauge.most()
        if self.gauge.device.type == "cuda":
            mine["reserved"] = self.gauge.reserved()
        packed = [0.0] * (world.size * len(mine))
        packed[world.rank * len(mine) : (world.rank + 1) * len(mine)] = mine.values()
        ready, *values = world.all_sum([float(bool(self.counted)), *packed])
        rows = [
            dict(zip(mine, values[start : start + len(mine)], strict=True))
            for start in range(0, len(values), len(mine))
        ]
        return rows if ready == world.size else []


def _size(values: list[Any], device: str, seen: set[int]) -> int:
    """Bytes of the storages of all tensors in `values` that are on a `device` and not in `seen`; adds them to it."""
    total = 0
    for tensor in _tensors(values):
        if tensor.device.type != device:
            continue
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a layout or subclass without one
            total += tensor.nbytes
            continue
        place = storage.data_ptr()
        total += 0 if place in seen else storage.nbytes()
        if place:  # without memory yet, or on meta, there is no place to know it again by
            seen.add(place)
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors that are here, of whatever holds them: state may be nested, a gradient sharded or sparse."""
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


def table(rows: Sequence[Row], step: int, device: str) -> list[str]:
    """Lines for people, in MiB: a rank each, or with many ranks the extremes; and what stands out."""
    order = sorted(range(len(rows)), key=lambda rank: rows[rank]["peak"])
    shown: dict[str, Row] = {
        str(rank): rows[rank] for rank in (range(len(rows)) if len(rows) <= RANKS_SHOWN else (order[0], order[-1]))
    }
    if len(rows) > RANKS_SHOWN:
        for name, choose in (("min", min), ("median", statistics.median), ("max", max)):
            shown[name] = {column: choose(row[column] for row in rows) for column in rows[0]}
    width = max(len(name) for name in [*shown, "rank"])
    lines = [f"memory at step {step} in MiB, {'allocated on the device' if device == 'cuda' else 'resident'}:"]
    lines.append("  ".join(["rank".rjust(width), *(name.rjust(10) for name in rows[0])]))
    lines += [
        "  ".join([name.rjust(width), *(f"{row[column] / MB:,.1f}".rjust(max(10, len(column))) for column in row)])
        for name, row in shown.items()
    ]
    low, high = rows[order[0]], rows[order[-1]]
    apart = high["peak"] - low["peak"]
    if high["peak"] > _IMBALANCE * low["peak"]:
        most = max((name for name in high if name not in ("peak", "reserved")), key=lambda name: high[name] - low[name])
        where = (
            f"mostly in {most}"
            if high[most] - low[most] > apart / 2
            else "before training, in saving, or in several columns"
        )
        lines.append(f"rank {order[-1]} held {apart / MB:,.1f} MiB more than rank {order[0]} at its peak, {where}")
    return lines
