"""From `parallel.tensor` and `parallel.virtual_ranks` to a world, or to an error before anything is computed."""

from __future__ import annotations

import dataclasses

from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError
from lockstep.core.parallel import equal_bits
from lockstep.core.parallel.world import World
from lockstep.mesh.strategy import MeshFSDP


def laid_out(world: World, config: RunConfig) -> World:
    """`world`, in which `parallel.tensor` neighbouring ranks get the same samples and hold the layers of one model.

    One rank always holds the whole model: a run on a mesh may be evaluated by one process.

    Raises:
        UsageError: the ranks or other keys of the config do not fit a mesh; names the key, the nodes and the remedy.
    """
    tensor = config.parallel.tensor
    if config.parallel.virtual_ranks:
        return equal_bits.laid_out(world, config)
    if tensor == 1 or world.size == 1:
        return world
    check(config, world.size)
    _check_nodes(world, tensor, f"parallel.tensor={tensor}")
    return dataclasses.replace(world, tensor=tensor, strategy=MeshFSDP)


def check(config: RunConfig, ranks: int, of: str = "") -> None:
    """Raises UsageError if `parallel.tensor` does not fit other keys, or the ranks: of all nodes, or of one."""
    tensor = config.parallel.tensor
    where = f"parallel.tensor={tensor}"
    if ranks % tensor:
        what = f"{ranks} ranks{of} cannot be divided into tensor groups of {tensor}"
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        remedy = f"start a multiple of {tensor} ranks, or use one of {', '.join(map(str, divisors))}"
        raise UsageError(what, where=where, remedy=remedy)
    _check_keys(config, where)


def _check_nodes(world: World, tensor: int, where: str) -> None:
    """Raises UsageError if a tensor group spans two nodes: its ranks exchange activations in every layer."""
    nodes = world.nodes
    for first in range(0, world.size, tensor):
        group = range(first, first + tensor)
        if len({nodes.keys[rank] for rank in group}) > 1:
            named = ", ".join(nodes.describe([rank]) for rank in group)
            remedy = f"start a multiple of {tensor} ranks on each node, or lower parallel.tensor"
            raise UsageError(f"a tensor group spans several nodes: {named}", where=where, remedy=remedy)


def _check_keys(config: RunConfig, where: str) -> None:
    """Raises UsageError if another key asks for something that is not built, or not verified, on a mesh."""
    parallel = config.parallel
    refused = {
        "parallel.strategy=single": parallel.strategy == "single",
        "parallel.find_unused_parameters=true": parallel.find_unused_parameters,
        "parallel.static_graph=true": parallel.static_graph,
        "parallel.cpu_offload=true": parallel.cpu_offload,
        "compute.compile": config.compute.compile is not None,
        "precision=fp16": config.precision == "fp16",
        "optim.fused=true": bool(config.optim.fused),
        "data.on_error=skip": config.data.on_error == "skip",
        "watch.every": bool(config.watch.every),
    }
    found = [key for key, is_set in refused.items() if is_set]
    if found:
        what = f"does not work with {', '.join(found)}, which does not support models that are sharded across ranks"
        raise UsageError(what, where=where, remedy="remove these keys, or use parallel.tensor=1")
