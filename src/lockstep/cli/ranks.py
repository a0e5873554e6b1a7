"""The ranks of a command on this machine: how many, and how they start, with or without those of other nodes."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli.reporting import is_first
from lockstep.core import this_process
from lockstep.trainer import local_ranks

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep.launch.node_address import Several


def on_machine(
    settings: RunConfig, preset: str | None, nproc: str | None, overrides: Sequence[str] = (), default: str = "1"
) -> tuple[RunConfig, str]:
    """The config with the keys of a preset, and the number of ranks as text.

    Args:
        nproc: of the command line. It takes precedence over the preset's.
        default: the number of ranks if neither the command line nor the preset gives a number.

    Raises:
        UsageError: there is no such preset, it has errors, or this machine has too few GPUs for it.
    """
    from lockstep.cli import allocator

    if preset is None:
        allocator.use_expandable_segments(settings.device)
        return settings, nproc or default
    from lockstep.cli import config_preset
    from lockstep.core.parallel.launched import LAUNCHED

    chosen = config_preset.read(preset)
    changed = chosen.apply(settings, overrides)
    allocator.use_expandable_segments(changed.device)
    nproc = nproc or chosen.nproc or default
    local_ranks.check_nproc(nproc)
    if changed.device == "cuda" and not this_process.is_rank():
        from lockstep.core import devices

        chosen.check_fits(changed, None if nproc == "auto" else int(nproc), gpus=devices.gpus())
    if is_first() and LAUNCHED not in os.environ:
        for line in chosen.notes(settings, changed):
            print(line, file=sys.stderr, flush=True)
    return changed, nproc


def count(nproc: str) -> int:
    """The number of ranks that `--nproc` means; see `local_ranks.ranks_of`."""
    return local_ranks.ranks_of(nproc)


def is_launcher(nproc: str, max_restarts: int | None = None) -> bool:
    """True if this process must start ranks, and is not a rank itself."""
    local_ranks.check_nproc(nproc)
    return not this_process.is_rank() and (nproc != "1" or bool(max_restarts))


def launch(
    arguments: list[str],
    nproc: str,
    settings: RunConfig,
    *,
    several: Several | None = None,
    run_id: str = "",
    wait_s: float = 0.0,
    max_restarts: int = 0,
    cold: bool = False,
) -> None:
    """Run `lockstep ARGUMENTS` as ranks on this machine, and wait for their end.

    Args:
        several: the other nodes. None: this is the only machine.
        run_id: of the run, by which its nodes meet.
        wait_s: so long this node waits for the others, in seconds.
    """
    ranks = _prepare(nproc, settings, cold=cold)  # before torch is imported here
    if several is None:
        from lockstep.launch import launcher

        launcher.launch(arguments, ranks, max_restarts, main=run_command)
        return
    from lockstep.core.config.sections import training_keys
    from lockstep.launch import several_nodes
    from lockstep.launch.node_session import RendezvousParameters

    keys = training_keys(settings)
    nodes = RendezvousParameters(several.least, several.most, several.endpoint, run_id=run_id, wait_s=wait_s, keys=keys)
    several_nodes.launch(arguments, ranks, nodes, max_restarts, main=run_command)


def run_command(arguments: Sequence[str]) -> None:
    """The main function of a rank: `lockstep ARGUMENTS`."""
    sys.argv = ["lockstep", *arguments]
    runpy.run_module("lockstep", run_name="__main__")


def _prepare(nproc: str, settings: RunConfig, *, cold: bool) -> int:
    """Start the process from which ranks are forked, and give the number of ranks."""
    from lockstep.launch import launcher

    ranks = local_ranks.ranks_of(nproc)
    modules = ["lockstep.cli.application", *local_ranks.modules_of(settings)]
    launcher.prepare(ranks, cold=cold, modules=modules, host_computes=settings.parallel.cpu_offload)
    return ranks
