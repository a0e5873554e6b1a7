"""The names of a task's heads: the same on every rank, since sums over ranks are packed in their order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lockstep.distributed.strategy import Losses
from lockstep.distributed.world import World
from lockstep.errors import TrainingError, did_you_mean

Names = tuple[str, ...]


@dataclass(frozen=True)
class AgreedLosses:
    """What all ranks know of the losses. is_narrow: some have 16 bits. frozen: heads that are constants on all ranks although they
    have units, because all parameters they depend on are frozen."""

    names: Names
    is_narrow: bool
    frozen: frozenset[str]


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


def check_coefficients(coefficients: Collection[str], losses: Losses) -> None:
    """Raises TrainingError where a coefficient is that of no head."""
    unknown = sorted(set(coefficients) - set(losses))
    if unknown:
        remedy = f"{did_you_mean(unknown[0], losses)}The loss has the heads: {', '.join(losses)}"
        raise TrainingError(f"there is no head {unknown[0]!r}", where="Task.coefficients", remedy=remedy)


def agree_on_losses(losses: Losses, with_units: Collection[str], may_be_frozen: bool, world: World) -> AgreedLosses:
    """Called on all ranks with the losses of their first micro-batch, whenever the model was wrapped anew.

    Args:
        with_units: heads that have units in this micro-batch.
        may_be_frozen: whether some parameter is frozen.

    Raises:
        TrainingError: another rank has other heads.
    """
    names = agree(None, tuple(losses), "Task.loss", world)
    constant = [float(not loss.requires_grad) for loss in losses.values()]
    in_spite_of_units = [one * (head in with_units) for one, head in zip(constant, names, strict=True)]
    narrow = float(any(loss.requires_grad and loss.element_size() < 4 for loss in losses.values()))
    narrow_on, *counts = world.all_sum([narrow, *constant, *in_spite_of_units])
    places = range(len(names) if may_be_frozen else 0)
    frozen = frozenset(names[place] for place in places if counts[place] == world.size and counts[len(names) + place])
    return AgreedLosses(names, bool(narrow_on), frozen)
