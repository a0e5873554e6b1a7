"""The parts of a step: the micro-batches of a rank, and single samples, with their losses and gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.core.build import Run
from lockstep.core.data.dataset import name_of
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.order import split_for_rank
from lockstep.core.parallel.virtual import held
from lockstep.core.step import SAMPLES
from lockstep.watch.gradients import Detail
from lockstep.watch.trial import Share, detail, read


@dataclass(frozen=True)
class StepShare:
    """A part of a step, computed separately."""

    name: str
    """Which micro-batch, or which sample: its file, if the data set knows the file."""
    indices: tuple[int, ...]
    units: dict[str, float]
    """By head; under `SAMPLES` for all heads if the unit is the sample."""
    loss: dict[str, float]
    """By head: per unit."""
    grad_norm: float
    """Of the gradient of the mean over the units of this part."""
    is_filler: bool = False
    """Computed, but not counted."""


def of_rank(run: Run, rank: int, ranks: int, like: MicroBatch) -> list[StepShare]:
    """The micro-batches of a rank in the next step, computed with its seeds. All ranks call it.

    With virtual ranks, they are those of its virtual ranks.

    Args:
        rank: of `ranks` ranks, which need not be those of this process.
        like: a micro-batch of the training; the others are moved to the device like it.
    """
    count = run.world.virtual_ranks
    plan = run.plan if count else replace(run.plan, world=ranks)
    found = []
    for shard in held(rank, ranks, count) if count else (rank,):
        for number, one in enumerate(plan.rank_micro_batches(run.state.step, shard)):
            micro_batch = read(run.batches.loader.micro_batches, one, like, run.world.device)
            name = f"virtual rank {shard}, micro-batch {number}" if count else f"micro-batch {number}"
            found.append(_part(run, name, micro_batch, shard, number))
    return found


def samples(run: Run, like: MicroBatch) -> list[StepShare]:
    """The samples of the next step, each computed separately, in evaluation mode. All ranks call it.

    Ranks share the work, except for sharded models: all ranks compute each of their samples. In evaluation mode the
    samples do not depend on each other, and nothing is drawn.

    Returns:
        all samples, on every rank, in the order of the step.
    """
    drawn, epoch = run.plan.drawn(run.state.step)
    world, data = run.world, run.batches.loader.micro_batches.data
    first, by = (0, 1) if run.state.strategy.is_sharded else (world.rank, world.size)
    # All ranks make equally many passes, because the first of them are collectives: some samples are computed twice.
    chosen = [min(place, len(drawn) - 1) for place in range(first, -(-len(drawn) // by) * by, by)]
    training = run.model.training
    run.state.forward.eval()
    try:
        found = {}
        for place in chosen:
            (plan,) = split_for_rank(drawn[place : place + 1], epoch, 1, 1, 0)
            (index,) = plan.indices
            micro_batch = read(run.batches.loader.micro_batches, plan, like, world.device)
            found[place] = _part(run, name_of(data, index), micro_batch, world.rank, 0)
    finally:
        run.state.forward.train(training)
    gathered: list[dict[int, StepShare]] = world.broadcast(world.gather(found))
    by_place = {place: part for of_rank in gathered for place, part in of_rank.items()}
    return [by_place[place] for place in sorted(by_place)]


def _part(run: Run, name: str, micro_batch: MicroBatch, rank: int, number: int) -> StepShare:
    state = run.state
    units = dict(micro_batch.weights) if micro_batch.weights else {SAMPLES: float(micro_batch.samples)}
    if not any(units.values()):
        return StepShare(name, micro_batch.indices, units, {}, 0.0, micro_batch.filler)
    share = Share(rank, state.step, units, number)
    found = detail(state, micro_batch, share, dict(state.strategy.leaves()))
    loss = {head: total / (units.get(head, units.get(SAMPLES)) or math.nan) for head, total in found.losses.items()}
    return StepShare(name, micro_batch.indices, units, loss, _norm(found) / state.strategy.divisor, micro_batch.filler)


def _norm(found: Detail) -> float:
    return math.sqrt(sum(sums[-1] for sums in found.sums.values()))
