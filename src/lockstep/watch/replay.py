"""Repeats steps of a run in this process: from a checkpoint or from the beginning, up to any step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.core.build import Run
from lockstep.core.checkpoint import store
from lockstep.core.checkpoint.manifest import Checkpoint
from lockstep.core.data.loader import MicroBatch
from lockstep.core.loop import set_training_mode
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.simulated_rank import acting_as_rank
from lockstep.core.step import StepResult
from lockstep.parts import digest
from lockstep.parts.digest import Digest, fold
from lockstep.watch.state import state_digest, state_tensors
from lockstep.watch.verdict import Kind

_FARTHER = 2.0
"""A rank is at fault if its state is this many times farther from the correct one than the others'."""
Rebuild = Callable[[Checkpoint | None], Run]
"""Builds a run again from a checkpoint, with its state loaded; or from its beginning. All ranks call it."""


@dataclass(frozen=True)
class ReplayedStep:
    """A repeated step."""

    step: int
    """Number of finished steps."""
    result: StepResult
    """The losses of this rank, the samples, and the norm of the gradient."""
    loss: dict[str, float]
    """By head: the loss per unit of the global batch, over all ranks, as in the log."""
    grad_norm: float | None


def steps(
    run: Run,
    until: int,
    around: Callable[[int, list[MicroBatch]], contextlib.AbstractContextManager[None]] | None = None,
) -> Iterator[ReplayedStep]:
    """Repeat steps, from `run.state.step` to `until`. All ranks of `run` iterate together. Nothing is written.

    Args:
        run: from a `Rebuild`. It is not the run that trains: it has its own model and optimizer.
        around: makes a context around each step from its number (the first step is 1) and its micro-batches.
    """
    state = run.state
    set_training_mode(state.strategy)
    with contextlib.closing(run.batches._steps):
        while state.step < until:
            micro_batches = next(run.batches)
            with around(state.step + 1, micro_batches) if around else contextlib.nullcontext():
                result = run.update(state, micro_batches, run.plan.samples(state.step), want_norm=True)
            heads = sorted({head for losses in result.losses for head in losses})
            own = [[0.0] * len(heads) for _ in state.world.data_ranks]
            for losses, counts, place in zip(result.losses, result.counted, result.places, strict=True):
                for number, head in enumerate(heads):
                    if counts and head in losses:  # alternating optimizers each have their own
                        own[place][number] += float(losses[head])
            sums = state.world.sum_in_order(own)
            units = {head: result.totals.get(head, result.totals.get("", 0.0)) for head in heads}
            loss = {head: total / units[head] if units[head] else 0.0 for head, total in zip(heads, sums, strict=True)}
            norm = None if result.grad_norm is None else float(result.grad_norm)
            yield ReplayedStep(state.step, result, loss, norm)


def nearest(folder: Path, step: int) -> Checkpoint | None:
    """The newest checkpoint of at most `step` steps. None: there is none, and the run starts from the beginning."""
    return next((one for one in store.listed(folder) if one.step <= step), None)


def digests(run: Run) -> dict[str, Digest]:
    """The digests of weights, optimizer state and averages on this rank, by name."""
    return digest.digests(state_tensors(run.state))


@dataclass(frozen=True)
class _Again:
    """Repeated steps on this rank."""

    digests: dict[str, Digest]
    """Of their final state."""
    far: float
    """The distance of that state from the one that this rank holds (2-norm)."""
    traces: list[tuple[list[int], list[int]]]
    """By step: digests of the state before its update, and of the gradients after their exchange."""


def _replayed(run: Run, rebuild: Rebuild, step: int, checked: int) -> _Again:
    """Repeat the steps from the last checked checkpoint to `step`.

    All ranks loaded the same state at this start, and earlier steps may have had a different config.
    """
    known, last = run.folder != Path(), max(checked, run.first_step)
    checkpoint = run.world.on_rank0(lambda: nearest(run.folder / "checkpoints", last)) if known else None
    again = rebuild(checkpoint)
    traces: list[tuple[list[int], list[int]]] = []

    def look(*_: object) -> None:
        grads = {name: local(p.grad) for name, p in again.model.named_parameters() if p.grad is not None}
        traces.append((state_digest(again.state).tolist(), fold(grads).tolist()))

    handle = again.state.optimizer.register_step_pre_hook(look)
    for _ in steps(again, step):
        pass
    handle.remove()
    anew, held = state_tensors(again.state), state_tensors(run.state)
    apart = (float((held[name].double() - anew[name].double()).norm()) for name in anew.keys() & held.keys())
    return _Again(digest.digests(anew), math.hypot(*apart), traces)


def _parted_by_exchange(groups: Sequence[Sequence[_Again]]) -> bool:
    """True if ranks with the same rows diverge in the gradients after an exchange, from the same state."""
    for group in groups:
        for of_ranks in zip(*(one.traces for one in group), strict=False):
            if any(state != of_ranks[0][0] for state, _ in of_ranks):
                break
            if any(gradients != of_ranks[0][1] for _, gradients in of_ranks):
                return True
    return False


def judged_by_replay(
    run: Run, rebuild: Rebuild, step: int, held: dict[str, Digest], shard: int, ranks: tuple[int, ...]
) -> tuple[Kind, tuple[int, ...], str]:
    """Who is at fault if ranks hold different states after `step` steps: kind, ranks, and the evidence.

    Args:
        held: the digests of the state that this rank holds.
        shard: ranks with the same number hold the same rows.
        ranks: those whose state differs from the majority's, or all of them if there is no majority.
    """
    world = run.world
    checked = -1 if run.checked_step is None else run.checked_step
    try:
        again = _replayed(run, rebuild, step, checked)
        found = world.broadcast(world.gather((shard, held, again)))
    except torch.OutOfMemoryError:
        return "unclear", (), "There was not enough memory to repeat the steps"
    by_shard: dict[int, list[int]] = {}
    for rank, (of_shard, _, _) in enumerate(found):
        by_shard.setdefault(of_shard, []).append(rank)
    replays_differ = [
        rank for group in by_shard.values() for rank in group if found[rank][2].digests != found[group[0]][2].digests
    ]
    if not replays_differ:
        guilty = tuple(rank for rank, (_, mine, anew) in enumerate(found) if mine != anew.digests)
        if not guilty or len(guilty) == world.size:
            return _farthest([anew.far for *_, anew in found])
        names = " and ".join(f"rank {rank}" for rank in guilty)
        return (
            "memory",
            guilty,
            f"Repeated, the steps give the state of the other ranks: the memory or the device of {names}",
        )
    alone = tuple(ranks) if 2 * len(ranks) < world.size else ()
    if _parted_by_exchange([[found[rank][2] for rank in group] for group in by_shard.values()]):
        return "link", alone, "Repeated, the steps make the ranks diverge again, in the gradients after their exchange"
    for suspect in ranks[:2]:
        with acting_as_rank(suspect):
            posed = _replayed(run, rebuild, step, checked).digests
        told = world.broadcast(world.gather(posed))
        if all(told[rank] == found[suspect][1] for rank in by_shard[found[suspect][0]]):
            return (
                "code",
                (suspect,),
                f"All ranks reach the state of rank {suspect} when they run as rank {suspect}",
            )
    return ("device" if alone else "unclear"), alone, "Repeated, the steps make the ranks diverge again"


def _farthest(far: Sequence[float]) -> tuple[Kind, tuple[int, ...], str]:
    """Who is at fault if no rank has the state that the repeated steps give.

    The gradients of a wrong state reach all ranks with the next exchange. The rank that was wrong first is farther
    away.
    """
    text = "Repeated, the steps give a state that no rank has"
    rank = max(range(len(far)), key=far.__getitem__)
    next_one = sorted(far)[-2] if len(far) > 1 else 0.0
    if far[rank] > _FARTHER * next_one:
        return "memory", (rank,), f"{text}, and rank {rank} is farther from it than the others"
    return "unclear", (), f"{text}, and no rank is much closer to it"
