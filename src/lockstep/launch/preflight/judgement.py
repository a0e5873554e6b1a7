"""Faults before a training: judges the facts of all ranks. Nothing here communicates or reads files."""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import number_of
from lockstep.core.parallel.nodes import Nodes
from lockstep.launch.preflight.facts import LEAST_FREE, Facts
from lockstep.launch.preflight.links import Link, Sum
from lockstep.launch.preflight.shared_folder import Access

_SKEW_S = 5.0  # clocks that differ by more are reported; they are read within the time of a message
_MUCH_SLOWER = 4.0
_SLOW_LATENCY_S, _SLOW_BYTES_PER_S = 0.02, 2e7  # of a connection that makes any training slow
_GIB = 1 << 30
_SHOWN = 8


class Level(enum.StrEnum):
    """The weight of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class PreflightFinding:
    """The result of a check."""

    check: str
    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.what}" + (f"\n      remedy: {self.remedy}" if self.remedy else "")


def of_facts(facts: Sequence[Facts], nodes: Nodes, configs: Sequence[Mapping[str, Any]]) -> list[PreflightFinding]:
    """Judge what the ranks know about themselves.

    Args:
        facts: by rank.
        configs: by rank, the value of each key of the config; empty if all digests are equal.
    """
    return [
        *_versions(facts, nodes),
        *_config(facts, nodes, configs),
        *_source(facts, nodes),
        *_devices(facts, nodes),
        _processes(facts, nodes),
        *_memory(facts, nodes),
        *_clocks(facts, nodes),
        *_data(facts, nodes),
    ]


def _versions(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    found = []
    names = dict.fromkeys(name for fact in facts for name in fact.versions)
    for name in names:
        values = [fact.versions.get(name, "none") for fact in facts]
        usual, others = _odd(values)
        if not others:
            continue
        level = Level.FAULT
        if name == "python" and len({value.rsplit(".", 1)[0] for value in values}) == 1:
            level = Level.WARNING
        what = f"{name} {usual} on most ranks; " + "; ".join(
            f"{value} on {nodes.describe(ranks)}" for value, ranks in others.items()
        )
        where = ", ".join(dict.fromkeys(nodes.names[rank] for ranks in others.values() for rank in ranks))
        package = {"lockstep": "torch-lockstep", "torch": "torch"}.get(name, "")
        same = f"pip install '{package}=={usual.split(' (')[0]}'" if package else f"the same {name}"
        if name == "lockstep" and " (" in usual:
            same += ", or the same checkout (the digest of the code is in brackets)"
        found.append(PreflightFinding("versions", level, what, f"on node {where}: {same}"))
    usual_ones = ", ".join(f"{name} {_odd([fact.versions.get(name, 'none') for fact in facts])[0]}" for name in names)
    return found or [PreflightFinding("versions", Level.OK, usual_ones)]


def _config(facts: Sequence[Facts], nodes: Nodes, configs: Sequence[Mapping[str, Any]]) -> list[PreflightFinding]:
    _, others = _odd([fact.config for fact in facts])
    if not others:
        return [PreflightFinding("config", Level.OK, f"the same on all ranks ({facts[0].config[:12]})")]
    texts, remedies = [], []
    for key in sorted({key for config in configs for key in config}):
        usual, differing = _odd([repr(config.get(key)) for config in configs])
        for value, ranks in differing.items():
            texts.append(f"{key} is {value} on {nodes.describe(ranks)}, but {usual} on most ranks")
            remedies.append(f"{key}={usual}")
    more = [f"and {len(texts) - _SHOWN} more differences"] if len(texts) > _SHOWN else []
    where = ", ".join(dict.fromkeys(nodes.names[rank] for ranks in others.values() for rank in ranks))
    remedy = f"use the same command and the same files on all nodes; on node {where}: {' '.join(remedies[:_SHOWN])}"
    return [PreflightFinding("config", Level.FAULT, "; ".join([*texts[:_SHOWN], *more]), remedy)]


def _source(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    usual, others = _odd([fact.source for fact in facts])
    if others:
        ranks = [rank for found in others.values() for rank in found]
        what = f"the task's code on {nodes.describe(ranks)} differs from that of the other ranks"
        return [
            PreflightFinding(
                "task", Level.FAULT, what, "copy the same files to all nodes, or put them on a shared disk"
            )
        ]
    return [
        PreflightFinding("task", Level.OK, f"the same code on all ranks ({usual[:12]})" if usual else "a shipped task")
    ]


def _devices(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    owners: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact.identity is not None:
            owners.setdefault(fact.identity, []).append(rank)
    found = [
        PreflightFinding(
            "devices",
            Level.FAULT,
            f"{nodes.describe(ranks)} share the device {identity}",
            "give each rank a device: start fewer ranks on the node, or let the scheduler bind a device to each",
        )
        for identity, ranks in owners.items()
        if len(ranks) > 1
    ]
    what = f"{number_of(len(facts), 'rank')} on {number_of(nodes.count, 'node')}, "
    what += number_of(len(owners), "device") if owners else "no GPU"
    return found or [PreflightFinding("devices", Level.OK, what)]


def _processes(facts: Sequence[Facts], nodes: Nodes) -> PreflightFinding:
    texts = []
    for first in nodes.first_ranks:
        ranks = nodes.ranks_with(first)
        listed = ", ".join(f"rank {rank} is {facts[rank].process}" for rank in ranks[:_SHOWN])
        more = f", and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        texts.append(f"{listed}{more} on node {nodes.names[first]}")
    more_nodes = [f"and {number_of(len(texts) - _SHOWN, 'more node')}"] if len(texts) > _SHOWN else []
    return PreflightFinding("processes", Level.OK, "; ".join([*texts[:_SHOWN], *more_nodes]))


def _memory(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    known = {rank: fact.memory for rank, fact in enumerate(facts) if fact.memory is not None}
    if not known:
        return [PreflightFinding("device memory", Level.SKIPPED, "the devices share host memory")]
    found = []
    for rank, memory in known.items():
        found += of_memory(memory, facts[rank].users, nodes.describe([rank]))
    least = min(free for free, _ in known.values())
    return found or [PreflightFinding("device memory", Level.OK, f"{least / _GIB:.1f} GiB free or more")]


def of_memory(memory: tuple[int, int], users: Sequence[str], where: str) -> list[PreflightFinding]:
    """Judge the memory of a device.

    Args:
        memory: free bytes and all bytes.
        users: other processes that hold memory of it.
        where: the rank, or the device.
    """
    free, size = memory
    full = free < LEAST_FREE
    if not full and not users:
        return []
    named = "; ".join(users) or "other processes, which the driver does not list"
    what = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB are free on {where}: {named}"
    remedy = "end these processes, or choose a different device with CUDA_VISIBLE_DEVICES"
    return [PreflightFinding("device memory", Level.FAULT if full else Level.WARNING, what, remedy)]


def _clocks(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    if nodes.count == 1:
        return [PreflightFinding("clocks", Level.SKIPPED, "one node")]
    usual = facts[0].clock if nodes.count == 2 else statistics.median_low(fact.clock for fact in facts)
    wrong = {rank: fact.clock - usual for rank, fact in enumerate(facts) if abs(fact.clock - usual) > _SKEW_S}
    if not wrong:
        most = max(abs(fact.clock - usual) for fact in facts)
        return [PreflightFinding("clocks", Level.OK, f"within {most:.1f} s")]
    by_node = {nodes.keys[rank]: rank for rank in reversed(wrong)}
    texts = [
        f"the clock of node {nodes.names[rank]} is {abs(wrong[rank]):.0f} s {'ahead' if wrong[rank] > 0 else 'behind'}"
        for rank in sorted(by_node.values())
    ]
    remedy = "start the time service there (timedatectl set-ntp true): logs and file times are misleading"
    return [PreflightFinding("clocks", Level.WARNING, "; ".join(texts), remedy)]


def _data(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    found = []
    for rank, fact in enumerate(facts):
        if "data" in fact.extra:
            what = f"the data cannot be read on {nodes.describe([rank])}: {fact.extra['data']}"
            found.append(PreflightFinding("data", Level.FAULT, what, "check the mount of the data on that node"))
    known = [fact for fact in facts if "data" not in fact.extra]
    for key in known[0].data if known else ():
        usual, others = _odd([fact.data.get(key, "unknown") for fact in facts])
        others.pop("unknown", None)
        for value, ranks in others.items():
            what = f"{key} is {value} on {nodes.describe(ranks)}, but {usual} on most ranks"
            remedy = f"put the same data under the same path on node {nodes.names[ranks[0]]}, or change {key}"
            found.append(PreflightFinding("data", Level.FAULT, what, remedy))
    keys = sorted({key for fact in known for key, kind in fact.data.items() if not kind.startswith("nothing")})
    return found or [
        PreflightFinding("data", Level.OK, f"{', '.join(keys)}: the same everywhere" if keys else "no files")
    ]


def of_folder(folder: str, access: Sequence[Access], nodes: Nodes) -> list[PreflightFinding]:
    """Judge whether all ranks can use the run directory."""
    found = []
    by_fault: dict[str, list[int]] = {}
    for rank, seen in enumerate(access):
        if seen.fault:
            by_fault.setdefault(seen.fault, []).append(rank)
    for fault, ranks in by_fault.items():
        what = f"{nodes.describe(ranks)} cannot write there: {fault}"
        remedy = "mount the folder for writing and free space there, or give a different folder that all nodes share: "
        found.append(PreflightFinding("run directory", Level.FAULT, f"{folder}: {what}", f"{remedy}--run-dir DIR"))
    blind = {rank: seen.unseen for rank, seen in enumerate(access) if seen.unseen and not seen.fault}
    if blind:
        writers = sorted({rank for unseen in blind.values() for rank in unseen})
        what = f"{folder}: {nodes.describe(list(blind))} cannot see files that {nodes.describe(writers)} wrote there"
        remedy = "put the run directory on a file system that all nodes share: --run-dir DIR"
        found.append(PreflightFinding("run directory", Level.FAULT, what, remedy))
    return found or [PreflightFinding("run directory", Level.OK, f"{folder}: shared, and all ranks can write")]


def of_paths(facts: Sequence[Facts], nodes: Nodes) -> list[PreflightFinding]:
    """Judge whether ranks of the same node refer to the same folder as the run directory."""
    for rank in nodes.first_ranks:
        others = [other for other in nodes.ranks_with(rank) if facts[other].folder != facts[rank].folder]
        if others:
            what = (
                f"it is {facts[others[0]].folder} on {nodes.describe(others)}, but {facts[rank].folder} on rank {rank}"
            )
            remedy = f"start all ranks in the same folder, or give --run-dir {facts[rank].folder}"
            return [PreflightFinding("run directory", Level.FAULT, what, remedy)]
    return []


def of_room(free: int | None, size: int | None, *, is_saved: bool) -> PreflightFinding:
    """Judge whether the disk of the run directory has room for two checkpoints.

    Args:
        free: bytes; None: unknown.
        size: bytes of a checkpoint; None: not known yet.
        is_saved: whether a checkpoint already exists. Then space for one more is needed, and for two advised.
    """
    if free is None:
        return PreflightFinding("free disk", Level.SKIPPED, "the file system does not report it")
    if size is None:
        what = f"{free / _GIB:,.1f} GiB; train compares it with the checkpoint's size once the model is built"
        return PreflightFinding("free disk", Level.OK, what)
    what = f"{free / _GIB:,.3g} GiB are free, but two checkpoints take {2 * size / _GIB:,.3g} GiB"
    if free >= 2 * size:
        return PreflightFinding("free disk", Level.OK, what)
    remedy = "free space, lower checkpoint.keep_last, delete old checkpoints (lockstep checkpoints RUN_DIR --prune), "
    remedy += "or give a different --run-dir"
    is_fault = free < size or not is_saved
    return PreflightFinding("free disk", Level.FAULT if is_fault else Level.WARNING, what, remedy)


def of_links(total: Sum | None, links: Sequence[Link], nodes: Nodes) -> list[PreflightFinding]:
    """Judge the network between the nodes."""
    if total is None:
        return [PreflightFinding("network", Level.SKIPPED, "one node")]
    summed = f"a sum over {len(nodes.keys)} ranks: {1e3 * total.latency_s:.2g} ms, {total.bytes_per_s / 1e6:,.0f} MB/s"
    if not links:
        return [PreflightFinding("network", Level.OK, summed)]
    slow = [link for link in links if _is_slow(link, links)]
    if not slow:
        most, least = max(link.latency_s for link in links), min(link.bytes_per_s for link in links)
        what = f"{summed}; between nodes at most {1e3 * most:.2g} ms, at least {least / 1e6:,.0f} MB/s"
        return [PreflightFinding("network", Level.OK, what)]
    listed = "; ".join(
        f"{nodes.names[link.ranks[0]]} to {nodes.names[link.ranks[1]]}: "
        f"{1e3 * link.latency_s:.2g} ms, {link.bytes_per_s / 1e6:,.3g} MB/s"
        for link in slow[:_SHOWN]
    )
    ends = Counter(rank for link in slow for rank in link.ranks)
    all_ends = Counter(rank for link in links for rank in link.ranks)
    hosts = [nodes.names[rank] for rank, count in ends.items() if count == all_ends[rank] > 1]
    who = f"node {', '.join(hosts)} is slow to reach" if hosts and len(links) > 2 else "the connection is slow"
    remedy = "check its network card, cable and switch; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
    return [PreflightFinding("network", Level.WARNING, f"{who} ({listed}); {summed}", remedy)]


def _is_slow(link: Link, links: Sequence[Link]) -> bool:
    place = (len(links) - 1) // 4  # a good connection of this network: up to three in four may be slow
    latency = sorted(other.latency_s for other in links)[place]
    rate = sorted((other.bytes_per_s for other in links), reverse=True)[place]
    return (
        link.latency_s > max(_SLOW_LATENCY_S, _MUCH_SLOWER * latency)
        or link.bytes_per_s < rate / _MUCH_SLOWER
        or (len(links) == 1 and (link.latency_s > _SLOW_LATENCY_S or link.bytes_per_s < _SLOW_BYTES_PER_S))
    )


def _odd(values: Sequence[str]) -> tuple[str, dict[str, list[int]]]:
    """The value of most ranks (on a tie, of the lowest rank), and the ranks with each other value."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], -values.index(value)))
    others: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            others.setdefault(value, []).append(rank)
    return usual, others
