"""The names of a task's heads. All ranks must have the same names: sums over ranks are packed in their order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lockstep.core.errors import TrainingError, did_you_mean
from lockstep.core.parallel.strategy import Losses
from lockstep.core.parallel.world import World

HeadNames = tuple[str, ...]


@dataclass(frozen=True)
class AgreedLosses:
    """Facts about the losses that all ranks know."""

    names: HeadNames
    """The heads, in the order in which sums over ranks are packed."""
    is_narrow: bool
    """True if a loss has 16 bits on some rank."""
    frozen: frozenset[str]
    """Heads that are constants on all ranks although they have units: all parameters that they depend on are frozen."""


def agree(known: HeadNames | None, names: HeadNames, *, method: str, world: World) -> HeadNames:
    """Check that all ranks have the same heads.

    Args:
        known: the heads that the ranks agreed on before. None: the ranks have not agreed yet. Then all ranks call this
            function at the same time, because it gathers the names.
        names: heads that `method` returned on this rank, sorted; empty if `method` returned None.
        method: method of the task that returned the heads, for the error message.

    Returns:
        `names`.

    Raises:
        TrainingError: another rank has other heads (raised on all ranks), or this rank had other heads before.
    """
    remedy = "return the same keys on every rank and for every batch; a head without units has weight 0"
    if known is None:
        by_rank: list[HeadNames] = world.broadcast(world.gather(names))
        other = next((rank for rank, heads in enumerate(by_rank) if heads != by_rank[0]), None)
        if other is not None:
            what = f"rank 0 has the heads {list(by_rank[0])}, rank {other} has {list(by_rank[other])}"
            raise TrainingError(what, where=method, remedy=remedy)
    elif names != known:
        what = f"the heads are {list(names)} on rank {world.rank}, and were {list(known)} in the first step"
        raise TrainingError(what, where=method, remedy=remedy)
    return names


def check_coefficients(coefficients: Collection[str], losses: Losses) -> None:
    """Check that each coefficient belongs to a head.

    Raises:
        TrainingError: a coefficient belongs to no head.
    """
    unknown = sorted(set(coefficients) - set(losses))
    if unknown:
        remedy = f"{did_you_mean(unknown[0], losses)}The loss has the heads: {', '.join(losses)}"
        raise TrainingError(f"there is no head {unknown[0]!r}", where="Task.coefficients", remedy=remedy)


def agree_on_losses(losses: Losses, *, with_units: Collection[str], may_be_frozen: bool, world: World) -> AgreedLosses:
    """Bring together what each rank knows about the losses.

    All ranks call it with the losses of their first micro-batch, and again whenever other parameters train.

    Args:
        with_units: heads that have units in this micro-batch.
        may_be_frozen: whether some parameter of the model is frozen.

    Raises:
        TrainingError: another rank has other heads.
    """
    names = agree(None, tuple(losses), method="Task.loss", world=world)
    constant = [float(not loss.requires_grad) for loss in losses.values()]
    constant_with_units = [flag * (head in with_units) for flag, head in zip(constant, names, strict=True)]
    narrow = float(any(loss.requires_grad and loss.element_size() < 4 for loss in losses.values()))
    # Each count is the number of ranks on which the statement holds.
    narrow_on, *counts = world.all_sum([narrow, *constant, *constant_with_units])
    constant_on, with_units_on = counts[: len(names)], counts[len(names) :]
    frozen = frozenset(
        name
        for name, everywhere, somewhere in zip(names, constant_on, with_units_on, strict=True)
        if may_be_frozen and everywhere == world.size and somewhere
    )
    return AgreedLosses(names, bool(narrow_on), frozen)
