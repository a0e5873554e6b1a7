"""From the section `parallel` of a config to the strategy."""

from __future__ import annotations

from lockstep.core.errors import UsageError
from lockstep.core.parallel.ddp import DDP
from lockstep.core.parallel.fsdp import FSDP
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.single import Single
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.parallel.virtual_fsdp import VirtualFSDP
from lockstep.core.parallel.virtual_ranks import VirtualRanks
from lockstep.core.parallel.world import World


def make_strategy(options: ParallelConfig, world: World, *, trains: bool = True) -> Strategy:
    """The strategy that `options` ask for. On one rank there is nothing to synchronise or shard: it is `Single`.

    Args:
        trains: whether gradients will be computed. If they are not, `ddp` has nothing to do and becomes `Single`
            too.

    Raises:
        UsageError: `single` on several ranks, which would train as many models; or `fsdp` with unused parameters.
    """
    name = options.strategy
    if world.strategy is not None:
        made: Strategy = world.strategy(world, options)
        return made
    if options.virtual_ranks and trains:
        return VirtualFSDP(world, options) if name == "fsdp" and world.size > 1 else VirtualRanks(world, options)
    if world.size > 1 and name == "single" and trains:
        raise UsageError(
            f"{world.size} ranks would train {world.size} models",
            where="parallel.strategy=single",
            remedy="use ddp or fsdp, or one rank",
        )
    if world.size == 1 or name == "single" or (name == "ddp" and not trains):
        return Single(world, find_unused_parameters=options.find_unused_parameters)
    if name == "ddp":
        return DDP(world, options)
    if name != "fsdp":  # a new name needs its own branch
        raise AssertionError(f"no strategy is made for parallel.strategy={name}")
    if options.find_unused_parameters:
        raise UsageError(
            "fsdp cannot train with unused parameters",
            where="parallel.find_unused_parameters",
            remedy="use ddp, or a model whose trainable parameters are all part of each loss",
        )
    return FSDP(world, options)
