"""Replicas of the state: weights, optimizer state and averages on several ranks must be bitwise equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.core.build import Run
from lockstep.core.errors import number_of
from lockstep.core.parallel import sharded_tensor
from lockstep.core.step import TrainState
from lockstep.parts.digest import digests
from lockstep.parts.replicas import differing, differing_ranks, who_differs
from lockstep.watch.replay import judged_by_replay
from lockstep.watch.state import state_tensors
from lockstep.watch.verdict import Verdict


def differing_replicas(shards: Sequence[int], values: Sequence[tuple[int, int]]) -> list[int]:
    """The ranks whose values differ from the majority of those with the same shard; all of them without a majority."""
    groups = [{rank: values[rank] for rank, one in enumerate(shards) if one == shard} for shard in set(shards)]
    return sorted(rank for group in groups for rank in differing_ranks(group))


class Replicas:
    """Compares the state of the ranks, and determines who is at fault."""

    def __init__(self, state: TrainState) -> None:
        sharded = next((p for p in state.strategy.unwrapped.model.parameters() if sharded_tensor.is_sharded(p)), None)
        mesh: Any = getattr(sharded, "device_mesh", None)
        self.shard = 0 if mesh is None else int(mesh.get_local_rank("shard"))
        """Ranks with the same number hold the same rows."""
        self.are_there = state.world.size > (1 if mesh is None else int(mesh.size(mesh.mesh_dim_names.index("shard"))))
        """False if only one rank holds each row."""
        self.digests: Any = None
        """Of each tensor on this rank, after a difference was found."""

    def verdict(self, run: Run, step: int, rebuild: Callable[[Any], Run] | None) -> Verdict:
        """Who holds a different state after `step` steps. All ranks call it.

        All ranks repeat the steps since the last good checkpoint: the result shows which of two states is correct, and
        whether the difference comes again.
        """
        tensors = state_tensors(run.state)
        self.digests = digests(tensors)
        world = run.world
        held = {name: (self.shard, 1, digest) for name, digest in self.digests.items()}
        by_rank = world.broadcast(world.gather(held))
        found = differing(by_rank)
        first = found[0]
        more = f", and in {number_of(len(found) - 1, 'more tensor')}" if len(found) > 1 else ""
        shards = [next(iter(of.values()))[0] for of in by_rank]
        values = {rank: tuple(sorted(of.items())) for rank, of in enumerate(by_rank)}
        folded = [(hash(values[rank]), 0) for rank in range(world.size)]
        ranks = tuple(differing_replicas(shards, folded))
        alike = {
            rank: by_rank[rank][first.name][2] for rank in range(world.size) if shards[rank] == shards[first.ranks[0]]
        }
        what = f"the ranks do not hold the same state: {who_differs(alike)} in {first.name}{more}"
        # Those that differ are less than half of those that hold the same rows.
        sure = all(2 * len([r for r in ranks if shards[r] == one]) < shards.count(one) for one in set(shards))
        if rebuild is None:
            return Verdict("memory" if sure else "unclear", ranks, what, first.name, guilty=ranks if sure else ())
        kind, guilty, how = judged_by_replay(run, rebuild, step, self.digests, self.shard, ranks)
        if kind == "unclear" and sure:
            kind, guilty = "memory", ranks
        text = f"{what}{f'. {how}' if how else ''}"
        return Verdict(kind, guilty or ranks, text, first.name, guilty=guilty if kind != "code" else ())
