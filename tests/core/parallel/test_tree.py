"""Sums over many ranks: right, the same bits on all ranks, and few messages after one another."""

import math
import os
import struct
import threading
from collections import deque
from pathlib import Path

import pytest
import torch

from lockstep.core.parallel import tree
from lockstep.core.parallel.world import World, join_world
from tests import own_tasks, runs
from tests.ranks import run_ranks


def simulated(size):
    """The sum that each rank ends with, and the messages that it has waited for, one after another."""
    plans = [deque(tree.exchanges(rank, size)) for rank in range(size)]
    values, depths, sent = [3**0.5 * rank for rank in range(size)], [0] * size, {}
    while any(plans):
        begun = len(sent), sum(map(len, plans))
        for rank, plan in enumerate(plans):
            if not plan:
                continue
            other, sends, receives = plan[0]
            if sends and (rank, len(plan)) not in sent.get((rank, other, "done"), set()):
                sent.setdefault((rank, other), deque()).append((values[rank], depths[rank]))
                sent.setdefault((rank, other, "done"), set()).add((rank, len(plan)))
            if receives:
                if not sent.get((other, rank)):
                    continue
                value, depth = sent[other, rank].popleft()
                values[rank] = value if not sends and rank > other else values[rank] + value
                depths[rank] = max(depths[rank], depth + 1)
            plan.popleft()
        assert (len(sent), sum(map(len, plans))) != begun, "ranks wait for each other"
    return values, depths


@pytest.mark.cases("4")
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 12, 64, 511, 512, 513])
def test_every_rank_has_the_same_bits_of_the_sum_after_few_messages(size):
    values, depths = simulated(size)
    assert len({struct.pack("d", value) for value in values}) == 1
    assert values[0] == pytest.approx(3**0.5 * size * (size - 1) / 2)
    assert max(depths) <= 2 * math.log2(size)
    assert max(depths) <= math.floor(math.log2(size)) + 2 * (size & (size - 1) > 0)


def sums():
    with join_world("cpu") as world:
        found = [world.all_sum([0.1 * world.rank, 2.0**40 + world.rank]) for _ in range(3)]
        return found, world.all_max(-world.rank), world.all_max(world.rank * 2**40)


def test_ranks_sum_in_pairs():
    """Five ranks: the last exchanges with the first alone."""
    answers = run_ranks(5, sums)
    assert all(answer == answers[0] for answer in answers)
    (first, *others), least, most = answers[0]
    assert first == pytest.approx([1.0, 5 * 2.0**40 + 10])
    assert others == [first, first]
    assert (least, most) == (0, 4 * 2**40)


class Weighted(own_tasks.Plain):
    """A task that counts its own units."""

    def weight(self, batch):
        return len(batch[0])


def sums_of_steps(kind):
    """How often the ranks summed in each step but the first, and nobody else in the step."""
    from lockstep.core import build

    counts, real_step = [], build.train_step
    real_sums = World.all_sum, World.all_sum_later

    def counting(real_sum):
        def counted(self, values):
            counts[-1:] = [counts[-1] + 1] if counts else []
            return real_sum(self, values)

        return counted

    def counting_step(*arguments, **options):
        counts.append(0)
        result = real_step(*arguments, **options)
        steps.append(counts[-1])
        counts.clear()
        return result

    steps = []
    World.all_sum, World.all_sum_later = map(counting, real_sums)
    build.train_step = counting_step
    try:
        task = Weighted() if kind == "weighted" else own_tasks.Plain()
        runs.fit(task, runs.config(train={"steps": 5}))
    finally:
        World.all_sum, World.all_sum_later = real_sums
        build.train_step = real_step
    return steps[1:]


@pytest.mark.cases("weighted")
@pytest.mark.parametrize(("kind", "sums"), [("plain", 0), ("weighted", 1)])
def test_a_step_sums_once_on_the_host_and_not_at_all_where_the_plan_knows_its_units(kind, sums):
    assert run_ranks(2, sums_of_steps, kind) == [[sums] * 4] * 2


@pytest.mark.parametrize("size", [2, 3, 5, 6, 8, 64, 511, 512, 513])
def test_what_rank_0_has_comes_to_every_rank_once_and_on_a_short_way(size):
    far, reached = 0, [0]
    while set(reached) != set(range(size)):
        reached += [other for rank in reached for other in tree.next_ranks(rank, size) if other not in reached]
        far += 1
        assert far <= math.ceil(math.log2(size))
    before = [rank for rank in range(size) for _ in tree.next_ranks(rank, size)]
    assert len(before) == size - 1  # nobody is reached twice
    assert all(other & (other - 1) == rank for rank in range(size) for other in tree.next_ranks(rank, size))


def open_sockets():
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def values_of_two_threads():
    """Values that ranks bring together in a thread and in the main thread; and how many sockets that took."""
    with join_world("cpu") as world:
        before = open_sockets()
        there, rounds = world.in_background(), 20
        found = {"here": [], "there": []}

        def exchange(world, name, length):
            for number in range(rounds):
                gathered = world.gather((name, world.rank, "x" * length * world.rank))
                found[name].append((gathered, world.broadcast((name, number) if world.rank == 0 else None)))

        thread = threading.Thread(target=exchange, args=(there, "there", 1000))
        thread.start()
        exchange(world, "here", 10)
        sums = [world.all_sum([1.0])[0] for _ in range(rounds)]
        thread.join()
        return world.rank, found, sums, open_sockets() - before


def values_on_another_default_device():
    with join_world("cpu") as world, torch.device("meta"):
        return world.gather(world.rank), world.broadcast("all" if world.rank == 0 else None)


def test_objects_travel_whatever_the_default_device_of_torch_is():
    assert run_ranks(3, values_on_another_default_device) == [([0, 1, 2], "all"), (None, "all"), (None, "all")]


def test_a_background_thread_exchanges_values_beside_the_main_thread_without_further_connections():
    size = 5
    for rank, found, sums, more_sockets in run_ranks(size, values_of_two_threads):
        for name, length in (("here", 10), ("there", 1000)):
            of_all = [(name, other, "x" * length * other) for other in range(size)]
            assert found[name] == [(None if rank else of_all, (name, number)) for number in range(20)]
        assert sums == [size] * 20
        assert more_sockets == 0
