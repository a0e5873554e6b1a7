"""What a step computes, as a bundle records it: by micro-batch, and of the whole step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.build import Run
from lockstep.core.data.dataset import name_of
from lockstep.core.data.loader import MicroBatch
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.step import SAMPLES
from lockstep.parts.digest import digests
from lockstep.watch import replay
from lockstep.watch.trial import Share, detail

_NAMED = 8
"""So many samples of a micro-batch are named."""


@dataclass
class RecordedPass:
    """A micro-batch, computed as its rank does, before gradients are exchanged. Numbers are exact in JSON."""

    rank: int
    """Or virtual rank."""
    number: int
    """Of the micro-batch on this rank."""
    indices: list[int]
    names: list[str]
    """Of the first samples."""
    batch: list[int]
    """Digest of the tensors."""
    losses: dict[str, float] = field(default_factory=dict)
    """Sums over units, by head."""
    gradients: dict[str, list[int]] = field(default_factory=dict)
    """Digests by parameter."""

    @property
    def place(self) -> str:
        """For people."""
        return f"rank {self.rank}, micro-batch {self.number}"


@dataclass
class RecordedStep:
    """A step."""

    passes: list[RecordedPass] = field(default_factory=list)
    """Of all ranks."""
    losses: dict[str, float] = field(default_factory=dict)
    """By head: per unit of the global batch."""
    grad_norm: float | None = None
    gradients: dict[str, list[int]] = field(default_factory=dict)
    """Digests by parameter, after the exchange and clipping."""
    state: dict[str, list[int]] = field(default_factory=dict)
    """Digests of the state after the step."""


class StepRecorder:
    """Records a step of a run on this rank. All ranks use it alike."""

    def __init__(self, run: Run) -> None:
        self.run, self.step = run, RecordedStep()

    @contextlib.contextmanager
    def inside(self, micro_batches: Sequence[MicroBatch]) -> Generator[None, None, None]:
        """A context around the step."""
        self.step.passes = [_alone(self.run, *one) for one in by_shard(self.run, micro_batches)]
        handle = self.run.state.optimizer.register_step_pre_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def _see(self, *_: object) -> None:
        grads = {name: local(p.grad) for name, p in self.run.model.named_parameters() if p.grad is not None}
        self.step.gradients |= {name: list(found) for name, found in digests(grads).items()}

    def end(self, losses: dict[str, float], grad_norm: float | None) -> RecordedStep:
        """The record, when the step has ended. On every rank it has the passes of all ranks."""
        step, world = self.step, self.run.world
        step.losses, step.grad_norm = losses, grad_norm
        step.state = {name: list(found) for name, found in replay.digests(self.run).items()}
        of_ranks: list[list[RecordedPass]] = world.broadcast(world.gather(step.passes))
        step.passes = [one for passes in of_ranks for one in passes]
        return step


def by_shard(run: Run, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int, MicroBatch]]:
    """(rank or virtual rank, number on it, micro-batch) of the micro-batches of this rank."""
    shards = run.world.data_ranks
    each = len(micro_batches) // len(shards)
    return [(shards[place // each], place % each, one) for place, one in enumerate(micro_batches)]


def _alone(run: Run, rank: int, number: int, micro_batch: MicroBatch) -> RecordedPass:
    state, indices = run.state, micro_batch.indices
    units = dict(micro_batch.weights) if micro_batch.weights else {SAMPLES: float(micro_batch.samples)}
    data: Any = getattr(getattr(getattr(run.batches, "loader", None), "micro_batches", None), "data", None)
    names = [] if data is None else [name_of(data, index) for index in indices[:_NAMED]]
    divisor = state.strategy.divisor  # by which ranks divide the sum of their gradients: other strategies have others
    share = Share(rank, state.step, {head: (count or 1.0) * divisor for head, count in units.items()}, number)
    found = detail(state, micro_batch, share, dict(state.strategy.leaves()))
    return RecordedPass(
        rank,
        number,
        list(indices),
        names,
        list(found.batch),
        found.losses,
        {name: list(one) for name, one in found.gradients.items()},
    )
