"""Sums over the ranks of one machine through sockets are those of gloo, and end when a rank is lost."""

import contextlib
import functools
import operator
import os
import re
import socket
import threading
import time
from concurrent import futures
from unittest import mock

import pytest
import torch.distributed as dist

from lockstep.core.parallel import local_sums, world
from lockstep.core.parallel.local_sums import LocalSums
from lockstep.core.parallel.world import World, join_world
from lockstep.launch.watchdog import Watchdog
from tests.ranks import run_ranks
from tests.selection import mainly

VALUES = [[0.1, 1.0, 2.0**53], [0.2, 2.0, 1.0], [0.3, 3.0, 1.0], [1e-17, 4.0, 5.0]]


def pair():
    """Two ranks in this process."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return LocalSums(0, {1: one}), LocalSums(1, {0: other})


def sums(world_changes=()):
    """What a rank gets from several sums, of which some begin before an earlier one has ended."""
    with contextlib.ExitStack() as stack:
        for change in world_changes:
            stack.enter_context(change())
        joined = stack.enter_context(join_world("cpu"))
        own = VALUES[joined.rank % len(VALUES)]
        first, second = joined.all_sum_later(own), joined.all_sum_later([1.0])
        found = [second(), first(), first(), joined.all_sum_later([float(joined.rank)] * 2000)()[:1]]
        return found, joined.local_sums is not None, joined.all_sum(own)


@pytest.mark.parametrize("size", mainly([2, 3], [2, 3, 5, 8]))
def test_sums_are_those_of_gloo_in_the_order_of_ranks(size):
    answers = run_ranks(size, sums)
    rows = [VALUES[rank % len(VALUES)] for rank in range(size)]
    exact = [functools.reduce(operator.add, column) for column in zip(*rows, strict=True)]
    for found, is_local, of_gloo in answers:
        assert is_local
        assert found == [[size], exact, exact, [sum(range(size))]]
        assert of_gloo == pytest.approx(exact)


def other_machine():
    return mock.patch.object(world, "own_key", return_value=f"machine of {os.environ['RANK']}")


def other_user():
    """Somebody else connects to rank 0 first."""
    is_first = os.environ["RANK"] == "0"
    return mock.patch.object(local_sums, "_process_of", (lambda connection: 1) if is_first else local_sums._process_of)


@contextlib.contextmanager
def no_connection():
    """Rank 1 cannot connect, and rank 0 need not wait until its patience ends."""

    class Refused(socket.socket):
        def connect(self, address):
            raise OSError("not permitted")

    refused = Refused if os.environ["RANK"] == "1" else socket.socket
    with mock.patch.object(local_sums, "_ACCEPT_S", 3600.0), mock.patch.object(local_sums.socket, "socket", refused):
        yield


def no_sockets():
    """Rank 1 may not make sockets."""
    refused = mock.Mock(side_effect=OSError("not permitted"))
    return mock.patch.object(local_sums.socket, "socket", refused if os.environ["RANK"] == "1" else socket.socket)


def other_system():
    return mock.patch.object(local_sums.sys, "platform", "darwin")


CHANGES = [other_machine, other_user, no_connection, no_sockets, other_system]


@pytest.mark.parametrize("change", mainly([other_user], CHANGES))
def test_ranks_that_cannot_connect_sum_with_gloo(change):
    for found, is_local, _ in run_ranks(2, sums, [change]):
        assert not is_local
        assert found[:2] == [[2.0], pytest.approx([0.3, 3.0, 2.0**53])]


def test_a_rank_that_has_ended_is_named():
    one, other = pair()
    other.close()
    with contextlib.closing(one), pytest.raises(dist.DistNetworkError, match="connection to rank 1 failed"):
        one.begin([1.0])
    one, other = pair()
    wait = one.begin([1.0])
    assert local_sums.waits_for is None
    other.close()
    with contextlib.closing(one):
        for again in (wait, wait, lambda: one.begin([1.0])):
            with pytest.raises(dist.DistNetworkError, match=r"rank 1 (closed its connection|failed)"):
                again()


def test_ranks_that_sum_different_numbers_of_values_are_an_error():
    one, other = pair()
    one.begin([1.0, 2.0])
    with pytest.raises(dist.DistNetworkError, match="rank 0 sent 2 values, and 1 were expected"):
        other.begin([1.0])()
    one.close()
    other.close()


def test_a_world_that_nobody_joined_has_no_sockets():
    assert World(0, 2, 0, "cpu").local_sums is None


def test_the_process_at_the_other_end_is_known():
    one, other = pair()
    assert local_sums._process_of(one.sockets[1]) == os.getpid()
    one.close()
    other.close()


def test_a_rank_that_waits_says_for_whom_in_the_report_of_a_hang(monkeypatch):
    monkeypatch.setattr(local_sums, "waits_for", 3)
    watchdog = mock.Mock(rank=0, worked_since=0.0, main=threading.main_thread().ident)
    watchdog.heartbeat.configure_mock(phase=2, step=7)
    assert re.match(
        r"rank 0 \(.*\): training, step 7, silent for \d+ s, waits for the units of rank 3, at ",
        (Watchdog._stack(watchdog)),
    )


def test_the_rank_that_is_waited_for_is_known_while_it_lasts():
    one, other = pair()
    wait = one.begin([1.0])
    with futures.ThreadPoolExecutor() as pool:
        found = pool.submit(wait)
        while local_sums.waits_for != 1:
            time.sleep(0.001)
        other.begin([2.0])
        assert found.result() == [3.0]
    assert local_sums.waits_for is None
    one.close()
    other.close()
