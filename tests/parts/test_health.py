"""The rank for which all others wait is named, with its node and what it does; nothing else is."""

import os
import time
from unittest import mock

import pytest

from lockstep.core.parallel.nodes import Nodes
from lockstep.parts import health
from lockstep.parts.health import Health
from tests import own_tasks, runs
from tests.clock import only_sleep_takes_time
from tests.ranks import run_ranks

NODES = Nodes(("a", "a", "b", "b"), ("a", "a", "b", "b"), ("cuda:0", "cuda:1", "cuda:0", "cuda:1"))
EVEN = [1.0, 1.0, 1.0, 1.0]
NONE = [0.0, 0.0, 0.0, 0.0]


def look(judge, compute=EVEN, wait=NONE, steps=10, total_s=20.0):
    """The messages about a window of steps in which the ranks needed these seconds."""
    return judge.look(compute, wait, steps=steps, total_s=total_s)


def test_a_rank_is_named_after_two_windows_and_only_once():
    judge, slow = Health(NODES), [1.0, 1.0, 5.0, 1.1]
    assert look(judge, slow) == []
    (message,) = look(judge, slow)
    assert message.startswith(
        "warning: rank 2 (node b, cuda:0) computes for 500 ms in each step, a typical rank 100 ms, before gradients"
    )
    assert [look(judge, slow) for _ in range(5)] == [[]] * 5


def test_a_rank_that_waits_for_its_data_is_named_as_such():
    judge, waits = Health(NODES), [0.0, 3.0, 0.1, 0.0]
    messages = [look(judge, EVEN, waits) for _ in range(3)]
    assert [len(found) for found in messages] == [0, 1, 0]
    assert "rank 1 (node a, cuda:1) waits for data for 300 ms in each step, a typical rank 0 ms" in messages[1][0]


def test_a_change_is_told_again():
    judge, slow = Health(NODES), [1.0, 1.0, 5.0, 1.0]
    look(judge, slow), look(judge, slow)
    assert look(judge) == []
    assert look(judge) == ["rank 2 (node b, cuda:0): no longer late"]
    look(judge, EVEN, [0.0, 0.0, 4.0, 0.0])
    assert "waits for data" in look(judge, EVEN, [0.0, 0.0, 4.0, 0.0])[0]
    look(judge, slow)
    assert "computes" in look(judge, slow)[0]


def test_a_rank_that_is_late_now_and_then_is_named_a_few_times():
    judge, slow = Health(NODES), [1.0, 1.0, 5.0, 1.0]
    messages = [message for _ in range(50) for part in (slow, slow, EVEN, EVEN) for message in look(judge, part)]
    assert len(messages) == health._MOST


def test_a_node_that_is_late_is_named_as_a_whole():
    judge = Health(NODES)
    look(judge, [1.0, 1.0, 2.0, 2.1], total_s=5.0)
    (message,) = look(judge, [1.0, 1.0, 2.0, 2.1], total_s=5.0)
    assert message.startswith("warning: all 2 ranks of node b compute for 210 ms")


@pytest.mark.parametrize(
    ("compute", "total_s"),
    [
        ([1.0, 1.25, 1.0, 1.0], 20.0),  # less than 1.3 times
        ([0.001, 0.04, 0.001, 0.001], 20.0),  # less than 5 ms in each of 10 steps
        ([1.0, 2.0, 1.0, 1.0], 50.0),  # less than a tenth of each step
    ],
)
def test_small_differences_are_not_named(compute, total_s):
    judge = Health(NODES)
    assert [look(judge, compute, total_s=total_s) for _ in range(4)] == [[]] * 4


def test_one_bad_window_is_not_named():
    judge, slow = Health(NODES), [1.0, 1.0, 5.0, 1.0]
    assert [look(judge, part) for part in (slow, EVEN, [5.0, 1.0, 1.0, 1.0], slow)] == [[]] * 4


def test_short_windows_are_judged_together():
    judge, slow = Health(NODES), [0.1, 0.1, 0.5, 0.1]
    messages = [look(judge, slow, steps=1, total_s=2.0) for _ in range(12)]
    assert [number for number, found in enumerate(messages, 1) if found] == [10]


def test_figures_are_per_step():
    found = health.figures([0.2, 0.4], [0.0, 0.1], steps=10, shown=16)
    assert found == {
        "health/compute_ms": 40.0,
        "health/compute_ms/rank0": 20.0,
        "health/compute_ms/rank1": 40.0,
        "health/data_wait_ms": 10.0,
        "health/data_wait_ms/rank0": 0.0,
        "health/data_wait_ms/rank1": 10.0,
        "health/slowest_rank": 1,
    }
    assert health.figures([0.2, 0.4], [0.0, 0.1], steps=10, shown=1).keys() == {
        "health/compute_ms",
        "health/data_wait_ms",
        "health/slowest_rank",
    }


class SlowLoss(own_tasks.Plain):
    """Rank 1 needs long for its forward pass."""

    def loss(self, model, batch):
        time.sleep(0.03 * (os.environ["RANK"] == "1"))
        return super().loss(model, batch)


class SlowData(own_tasks.Plain):
    """Rank 1 needs long for each of its samples."""

    def prepare(self, sample, epoch, training):
        time.sleep(0.004 * (os.environ["RANK"] == "1"))
        return sample


def train(kind, folder, settings):
    node = {"LOCKSTEP_NODE": f"node-{os.environ['RANK']}", "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, node), only_sleep_takes_time():
        _, results = runs.fit(kind(), settings, folder)
    return results


@pytest.mark.parametrize(
    ("kind", "what", "strategy"),
    [
        (SlowLoss, "computes for", "ddp"),
        (SlowData, "waits for data for", "fsdp"),
        pytest.param(SlowLoss, "computes for", "fsdp", marks=pytest.mark.exhaustive),
        pytest.param(SlowData, "waits for data for", "ddp", marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_names_its_slow_rank(kind, what, strategy, tmp_path):
    settings = runs.config(train={"steps": 15}, parallel={"strategy": strategy})
    results = run_ranks(2, train, kind, tmp_path, settings)[0]
    log = (tmp_path / "train.log").read_text()
    assert log.count(f"warning: rank 1 (node node-1, cpu) {what} ") == 1
    assert log.count("all ranks wait for it") == 1
    assert results["health/slowest_rank"] == 1
    key = "health/compute_ms" if kind is SlowLoss else "health/data_wait_ms"
    assert results[f"{key}/rank1"] == results[key] > 25 > results[f"{key}/rank0"]


def test_a_single_rank_has_no_such_figures(tmp_path):
    _, results = runs.fit(own_tasks.Plain(), runs.config(), tmp_path)
    assert not [name for name in results if name.startswith("health/")]
