"""The judgement of the facts of ranks: pure, for worlds that no test machine has."""

import dataclasses

import pytest

from lockstep.core.parallel.nodes import Nodes
from lockstep.launch.preflight import judgement
from lockstep.launch.preflight.facts import Facts
from lockstep.launch.preflight.judgement import Level
from lockstep.launch.preflight.links import Link, Sum
from lockstep.launch.preflight.shared_folder import Access


def nodes(*sizes):
    """Nodes `a`, `b`, ... with these numbers of ranks."""
    names = tuple(name for name, size in zip("abcdefgh", sizes, strict=False) for _ in range(size))
    devices = tuple(f"cuda:{place}" for size in sizes for place in range(size))
    return Nodes(names, names, devices)


def facts(of_nodes, **changes):
    """The facts of equal ranks, but for the values by rank in `changes`."""
    found = [
        Facts(
            node=name,
            key=key,
            process=100 + rank,
            device=device,
            identity=f"GPU-{rank}",
            versions={"lockstep": "1.0", "torch": "2.13.0", "python": "3.11.7"},
            config="same",
            source="same",
            folder="/runs/a",
            data={"data.train": "a folder"},
            clock=1000.0,
        )
        for rank, (key, name, device) in enumerate(zip(of_nodes.keys, of_nodes.names, of_nodes.devices, strict=True))
    ]
    for name, by_rank in changes.items():
        for rank, value in by_rank.items():
            found[rank] = dataclasses.replace(found[rank], **{name: value})
    return found


def judged(of_nodes, configs=(), **changes):
    """Findings that are not ok, as (check, level, what)."""
    findings = judgement.of_facts(facts(of_nodes, **changes), of_nodes, configs)
    return [(one.check, one.level, one.what) for one in findings if one.level in (Level.WARNING, Level.FAULT)]


TWO = nodes(2, 2)


def test_equal_ranks_have_no_fault():
    assert judged(nodes(8, 8, 8)) == []
    assert judged(nodes(1)) == []


@pytest.mark.parametrize(
    ("changes", "check", "level", "what"),
    [
        (
            {"versions": {3: {"lockstep": "1.0", "torch": "2.12.0", "python": "3.11.7"}}},
            "versions",
            Level.FAULT,
            "torch 2.13.0 on most ranks; 2.12.0 on rank 3 (node b, cuda:1)",
        ),
        (
            {"versions": {rank: {"lockstep": "1.0", "torch": "2.13.0", "python": "3.12.1"} for rank in (2, 3)}},
            "versions",
            Level.FAULT,
            "python 3.11.7 on most ranks; 3.12.1 on all 2 ranks of node b",
        ),
        (
            {"versions": {3: {"lockstep": "1.0", "torch": "2.13.0", "python": "3.11.9"}}},
            "versions",
            Level.WARNING,
            "python 3.11.7 on most ranks; 3.11.9 on rank 3 (node b, cuda:1)",
        ),
        (
            {"source": {2: "other"}},
            "task",
            Level.FAULT,
            "the task's code on rank 2 (node b, cuda:0) differs from that of the other ranks",
        ),
        (
            {"identity": {1: "GPU-7", 2: "GPU-7"}},
            "devices",
            Level.FAULT,
            "rank 1 (node a, cuda:1), rank 2 (node b, cuda:0) share the device GPU-7",
        ),
        ({"clock": {2: 1100.0, 3: 1100.0}}, "clocks", Level.WARNING, "the clock of node b is 100 s ahead"),
        (
            {"data": {2: {"data.train": "nothing"}}},
            "data",
            Level.FAULT,
            "data.train is nothing on rank 2 (node b, cuda:0), but a folder on most ranks",
        ),
        (
            {"memory": {0: (1 << 29, 80 << 30)}, "users": {0: ("process 7 (python) holds 70000 MiB",)}},
            "device memory",
            Level.FAULT,
            "0.5 of 80.0 GiB are free on rank 0 (node a, cuda:0): process 7 (python) holds 70000 MiB",
        ),
        (
            {"memory": {0: (40 << 30, 80 << 30)}, "users": {0: ("process 7 (python) holds 40000 MiB",)}},
            "device memory",
            Level.WARNING,
            "40.0 of 80.0 GiB are free on rank 0 (node a, cuda:0): process 7 (python) holds 40000 MiB",
        ),
    ],
)
def test_what_differs_is_named_with_rank_and_node(changes, check, level, what):
    assert judged(TWO, **changes) == [(check, level, what)]


def test_keys_of_the_config_that_differ_are_named():
    usual = {"optim.lr": 0.1, "seed": 0}
    configs = [usual, usual, usual | {"optim.lr": 0.2}, {"optim.lr": 0.2}]
    ((check, level, what),) = judged(TWO, configs, config={2: "other", 3: "third"})
    assert (check, level) == ("config", Level.FAULT)
    assert "optim.lr is 0.2 on all 2 ranks of node b, but 0.1 on most ranks" in what
    assert "seed is None on rank 3 (node b, cuda:1), but 0 on most ranks" in what


def test_folder_that_cannot_be_written_or_is_not_shared():
    access = [Access(""), Access(""), Access("Read-only file system"), Access("", unseen=(0,))]
    refused, blind = judgement.of_folder("/runs/a", access, TWO)
    assert refused.what == "/runs/a: rank 2 (node b, cuda:0) cannot write there: Read-only file system"
    assert blind.what == ("/runs/a: rank 3 (node b, cuda:1) cannot see files that rank 0 (node a, cuda:0) wrote there")
    assert {refused.level, blind.level} == {Level.FAULT}
    (fine,) = judgement.of_folder("/runs/a", [Access("")] * 4, TWO)
    assert fine.level == Level.OK


def test_ranks_of_a_node_with_another_folder():
    (fault,) = judgement.of_paths(facts(TWO, folder={3: "/home/b/runs"}), TWO)
    assert fault.what == "it is /home/b/runs on rank 3 (node b, cuda:1), but /runs/a on rank 2"
    assert judgement.of_paths(facts(TWO, folder={2: "/mnt/runs", 3: "/mnt/runs"}), TWO) == []  # another mount point


@pytest.mark.parametrize(
    ("free", "size", "is_saved", "level"),
    [
        (None, 10, False, Level.SKIPPED),
        (100, None, False, Level.OK),
        (20, 10, False, Level.OK),
        (19, 10, False, Level.FAULT),
        (19, 10, True, Level.WARNING),
        (9, 10, True, Level.FAULT),
    ],
)
def test_room_on_the_disk(free, size, is_saved, level):
    assert judgement.of_room(free, size, is_saved=is_saved).level == level


FAST, SLOW = (1e-4, 1e9), (1e-4, 1e8)


@pytest.mark.parametrize(
    ("links", "who"),
    [
        ([(0, 1, *FAST), (1, 2, *FAST), (2, 0, *FAST)], None),
        ([(0, 1, *SLOW), (1, 2, *SLOW), (2, 0, *FAST)], "node b is slow to reach (a to b: "),
        ([(0, 1, 0.1, 1e9), (1, 2, 0.1, 1e9), (2, 0, *FAST)], "node b is slow to reach (a to b: 1e+02 ms"),
        ([(0, 1, *FAST), (1, 2, *SLOW), (2, 0, *FAST)], "the connection is slow (b to c: 0.1 ms, 100 MB/s)"),
        ([(0, 1, *FAST)], None),
        ([(0, 1, 0.2, 1e9)], "the connection is slow (a to b: 2e+02 ms"),
        ([(0, 1, 1e-4, 1e7)], "the connection is slow (a to b: 0.1 ms, 10 MB/s)"),
    ],
)
def test_slow_links_are_named_by_their_node(links, who):
    found = [Link((first, second), latency, rate) for first, second, latency, rate in links]
    (finding,) = judgement.of_links(Sum(1e-3, 1e9), found, nodes(1, 1, 1))
    assert finding.level == (Level.WARNING if who else Level.OK)
    assert finding.what.startswith(who or "a sum over 3 ranks: 1 ms, 1,000 MB/s")


def test_ranks_are_described_by_node_and_device():
    assert (
        nodes(2, 2, 1).describe([0, 1, 2, 4])
        == "all 2 ranks of node a, rank 2 (node b, cuda:0), rank 4 (node c, cuda:0)"
    )
    assert nodes(8).describe(range(6)).endswith("rank 3 (node a, cuda:3), 2 more ranks")
    assert nodes(2, 2).first_ranks == [0, 2]
    assert nodes(2, 2).ranks_with(3) == [2, 3]
