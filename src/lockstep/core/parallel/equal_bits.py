"""What `parallel.virtual_ranks` requires of the config, the ranks, the model and this process: see `virtual_ranks`."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Generator
from pathlib import Path

import torch
from torch import nn

from lockstep.core import devices
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError, listed, number_of
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.world import World

_OF_16_BITS = (torch.bfloat16, torch.float16)


def laid_out(world: World, config: RunConfig) -> World:
    """`world` with the virtual ranks of the config.

    Raises:
        UsageError: another key asks for what cannot have the same bits on any number of ranks, or the ranks compute on
            different kinds of devices.
    """
    count = config.parallel.virtual_ranks
    parallel, where = config.parallel, f"parallel.virtual_ranks={count}"
    sharded = parallel.strategy == "fsdp"  # on one rank, too: the run may continue on several
    refused = {
        "parallel.shard_ranks": sharded and parallel.shard_ranks is not None,
        "parallel.find_unused_parameters=true": sharded and parallel.find_unused_parameters,
        "parallel.reduce_each_micro_batch=true": sharded and parallel.reduce_each_micro_batch,
        "parallel.cpu_offload=true": sharded and parallel.cpu_offload,
        "parallel.param_dtype": sharded and parallel.param_dtype is not None,
        "parallel.reduce_dtype": sharded and parallel.reduce_dtype is not None,
        f"parallel.tensor={parallel.tensor}": parallel.tensor > 1,
        "parallel.static_graph=true": parallel.static_graph,
        "watch.every": bool(config.watch.every),
        "compute.compile": config.compute.compile is not None,
        "compute.cudnn_benchmark=true": bool(config.compute.cudnn_benchmark),
    }
    found = [key for key, is_set in refused.items() if is_set]
    if found:
        what = f"virtual ranks do not work with {', '.join(found)}"
        raise UsageError(what, where=where, remedy="remove these keys, or leave parallel.virtual_ranks out")
    _check_kinds(world, where)
    return dataclasses.replace(world, virtual_ranks=count)


def checked_count(world: World, options: ParallelConfig) -> int:
    """The number of virtual ranks.

    Raises:
        UsageError: there are more ranks.
    """
    count = options.virtual_ranks or 1
    if world.size > count:
        raise UsageError(
            f"{world.size} ranks cannot share {count} virtual ranks",
            where=f"parallel.virtual_ranks={count}",
            remedy=f"start at most {number_of(count, 'rank')}: --nproc {count}. More virtual ranks are a new training",
        )
    return count


def _check_kinds(world: World, where: str) -> None:
    kinds = world.broadcast(world.gather(kind(world.device)))
    if len(set(kinds)) > 1:
        shown = "; ".join(f"rank {kinds.index(one)}: {one}" for one in dict.fromkeys(kinds))
        what = f"the ranks compute on different kinds of devices, whose kernels round differently: {shown}"
        raise UsageError(what, where=where, remedy="start ranks on one kind of device, or leave the key out")


def check_model(model: nn.Module, options: ParallelConfig) -> None:
    """Raises UsageError if the model computes statistics over ranks, or its updates depend on the number of ranks."""
    where = f"parallel.virtual_ranks={options.virtual_ranks}"
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        what = f"SyncBatchNorm exchanges the statistics of ranks, not of virtual ranks: {listed(names, 5)}"
        raise UsageError(what, where=where, remedy="use BatchNorm, whose batch is a micro-batch of a virtual rank")
    # torch's `add_` with a factor rounds the elements after the last full vector of a tensor differently.
    narrow = [name for name, parameter in model.named_parameters() if parameter.dtype in _OF_16_BITS]
    if narrow and options.strategy == "fsdp":
        what = f"the update of a shard of a 16-bit weight differs from that of the whole weight: {listed(narrow, 5)}"
        remedy = "keep the weights in float32, with precision=bf16 if you like, or use parallel.strategy=ddp"
        raise UsageError(what, where=where, remedy=remedy)


def check_optimizer(optimizer: torch.optim.Optimizer, options: ParallelConfig) -> None:
    """Raises UsageError if a fused kernel would update a shard differently than the whole weight."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and options.virtual_ranks is not None and options.strategy == "fsdp":
        what = "fused kernels update a shard of a weight differently than the whole weight"
        remedy = "leave optim.fused out, or use parallel.strategy=ddp"
        raise UsageError(what, where=f"optim.fused=true, parallel.virtual_ranks={options.virtual_ranks}", remedy=remedy)


def kind(device: torch.device) -> str:
    """The kind of device: kernels of different kinds round differently. For a CPU, its model and instructions."""
    if device.type != "cpu":
        return devices.of(device).name()
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


@contextlib.contextmanager
def one_thread(world: World) -> Generator[None, None, None]:
    """Inside, each rank on a CPU computes with one thread, if there are virtual ranks.

    The number of threads decides how a kernel divides a sum, and by default it depends on the number of ranks.
    """
    threads = torch.get_num_threads()
    changes = world.virtual_ranks is not None and world.device.type == "cpu"
    if changes:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if changes:
            torch.set_num_threads(threads)
