"""The checks before a training, on all ranks together."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.core import devices, this_process
from lockstep.core.checkpoint import manifest
from lockstep.core.errors import UsageError, number_of
from lockstep.core.parallel import launched
from lockstep.core.parallel.nodes import own_name
from lockstep.core.parallel.world import World
from lockstep.launch.preflight import facts, judgement, links, shared_folder
from lockstep.launch.preflight.facts import Subject
from lockstep.launch.preflight.judgement import Level, PreflightFinding


def check(subject: Subject, world: World, *, everything: bool = False) -> list[PreflightFinding]:
    """Judge whether these ranks can train. All ranks call it.

    Args:
        everything: also check what cannot be wrong on a single node.

    Returns:
        the findings, the same on every rank, including faults.
    """
    room = world.on_rank0(lambda: _room(subject))
    if world.size == 1 and not everything:
        return [*_device_alone(world), room]
    if world.size > 1 and launched.LAUNCHED not in os.environ:  # srun and torchrun may keep a log of each rank
        name = f"[rank {world.rank}] process {os.getpid()} on node {own_name()}"
        print(f"{name}, local rank {this_process.local_rank()}, {world.device}", file=sys.stderr, flush=True)
    found: list[facts.Facts] = world.broadcast(world.gather(facts.of_rank(subject, world)))
    nodes = world.nodes
    configs = []
    if len({one.config for one in found}) > 1:
        configs = world.broadcast(world.gather(dict(subject.config)))
    findings = [*judgement.of_facts(found, nodes, configs), *judgement.of_paths(found, nodes), room]
    several = nodes.count > 1
    if several or everything:
        world.heartbeat.beats += 1
        access = shared_folder.probe(subject.folder, world)
        world.heartbeat.beats += 1
        findings += judgement.of_folder(str(subject.folder), access, nodes)
        total = links.sum_over_ranks(world) if world.size > 1 else None
        findings += judgement.of_links(total, links.between_nodes(world) if several else [], nodes)
        findings += [PreflightFinding("rendezvous", Level.OK, _meeting_place(world))]
    return findings


def _device_alone(world: World) -> list[PreflightFinding]:
    """A note if the device of a single rank has little free memory, and other processes hold some."""
    device = devices.of(world.device)
    if not device.has_own_memory:
        return []
    memory, users = facts.memory_of(device)
    if memory is None:
        return []
    return judgement.of_memory(memory, users, str(world.device))


def raise_faults(findings: Sequence[PreflightFinding]) -> None:
    """Raise if something is wrong.

    Raises:
        UsageError: names all faults at once.
    """
    faults = [finding for finding in findings if finding.level == Level.FAULT]
    if len(faults) == 1:
        raise UsageError(faults[0].what, where=f"preflight, {faults[0].check}", remedy=faults[0].remedy)
    if faults:
        listed = "\n    ".join(map(str, faults))
        raise UsageError(f"{number_of(len(faults), 'fault')} before the training:\n    {listed}", where="preflight")


def lines(findings: Sequence[PreflightFinding]) -> list[str]:
    """Log lines about the findings: warnings, the processes of the ranks, and the speed of the network."""
    return [
        f"warning: {finding.what}. {finding.remedy}"
        if finding.level == Level.WARNING
        else f"{finding.check}: {finding.what}"
        for finding in findings
        if finding.level == Level.WARNING or (finding.check in ("processes", "network") and finding.level == Level.OK)
    ]


def _room(subject: Subject) -> PreflightFinding:
    """True if there is space for more checkpoints of the run's size."""

    def look() -> PreflightFinding:
        saved = [] if subject.fresh else manifest.listed(subject.folder / "checkpoints")
        if saved and subject.stop is not None and saved[0].step >= subject.stop:
            return PreflightFinding("free disk", Level.SKIPPED, "the run is complete")
        return judgement.of_room(free_bytes(subject.folder), saved[0].size if saved else None, is_saved=bool(saved))

    found, fault = facts.within(look, facts.ANSWER_S)
    remedy = "check its mount and permissions, or give a different --run-dir"
    return found or PreflightFinding("run directory", Level.FAULT, f"{subject.folder} cannot be read: {fault}", remedy)


def check_room(folder: Path, size: int, world: World) -> None:
    """Check that the disk has space for two checkpoints of a new run. All ranks call it.

    Args:
        size: bytes of a checkpoint.

    Raises:
        UsageError: it does not.
    """
    raise_faults([world.on_rank0(lambda: judgement.of_room(free_bytes(folder), size, is_saved=False))])


def free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk of a folder, which need not exist; None if the system does not report them."""
    try:
        return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    except OSError:
        return None


def _meeting_place(world: World) -> str:
    if world.size == 1:
        return "one rank"
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    place = f"{host}:{port}" if host and port and "LOCKSTEP_STORE" not in os.environ else "a file of this machine"
    return f"all {world.size} ranks met at {place}"
