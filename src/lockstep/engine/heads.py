"""The names of a task's heads: the same on every rank, since sums over ranks are packed in their order."""

from __future__ import annotations

from lockstep.dist.world import World
from lockstep.errors import TrainingError

Names = tuple[str, ...]


def agree(known: Names | None, names: Names, method: str, world: World) -> Names:
    """`names`, once all ranks are known to have the same.

    Args:
        known: what ranks agreed on before; None: they have not, so all of them call this now (a collective).
        names: of the heads that `method` returned here, sorted; empty where it returned None.

    Raises:
        TrainingError: another rank has other heads (on all ranks), or this rank had others before.
    """
    remedy = "return the same keys on every rank and for every batch; a head without units has weight 0"
    if known is None:
        found: list[Names] = world.broadcast(world.gather(names))
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            what = f"rank 0 has the heads {list(found[0])}, rank {other} has {list(found[other])}"
            raise TrainingError(what, where=method, remedy=remedy)
    elif names != known:
        what = f"the heads are {list(names)} on rank {world.rank}, and were {list(known)} in the first step"
        raise TrainingError(what, where=method, remedy=remedy)
    return names
