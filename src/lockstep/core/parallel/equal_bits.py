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
from lockstep.core.errors import UsageError, listed
from lockstep.core.parallel.world import World


def laid_out(world: World, config: RunConfig) -> World:
    """`world` with the virtual ranks of the config.

    Raises:
        UsageError: another key asks for what cannot have the same bits on any number of ranks, or the ranks compute on
            different kinds of devices.
    """
    count = config.parallel.virtual_ranks
    parallel, where = config.parallel, f"parallel.virtual_ranks={count}"
    refused = {
        "parallel.strategy=fsdp": parallel.strategy == "fsdp",
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


def _check_kinds(world: World, where: str) -> None:
    kinds = world.broadcast(world.gather(kind(world.device)))
    if len(set(kinds)) > 1:
        shown = "; ".join(f"rank {kinds.index(one)}: {one}" for one in dict.fromkeys(kinds))
        what = f"the ranks compute on different kinds of devices, whose kernels round differently: {shown}"
        raise UsageError(what, where=where, remedy="start ranks on one kind of device, or leave the key out")


def check_model(model: nn.Module, where: str) -> None:
    """Raises UsageError if the model computes statistics over ranks, which depend on their number."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        what = f"SyncBatchNorm exchanges the statistics of ranks, not of virtual ranks: {listed(names, 5)}"
        raise UsageError(what, where=where, remedy="use BatchNorm, whose batch is a micro-batch of a virtual rank")


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
