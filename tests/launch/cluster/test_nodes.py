"""Several nodes as network namespaces, each with an address of its own: make test-cluster."""

import re
import signal

import pytest

from tests import namespaces, processes, rank_cases
from tests.namespaces import Namespaces, Training, kill, tree
from tests.ranks import run_ranks
from tests.test_recovery import SETTINGS, same, state

TASKS = """
import time
from tests.own_tasks import Plain

class SlowSteps(Plain):
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)
"""
LONG = ["log.writers=[text_log,json_lines]", "train.eval_every_steps=0", "checkpoint.every_steps=20"]
LONG += ["log.every_steps=1", "train.steps=1000000"]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(reason := namespaces.why_not()), reason=str(reason)),
]


@pytest.fixture
def slow_steps(tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS)
    return f"{tmp_path}/tasks.py:SlowSteps"


def on_one_node(ranks, folder):
    run_ranks(ranks, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", folder)
    return state(folder)


@pytest.mark.parametrize("nproc", [(1, 1, 1), (2, 1)])
def test_weights_are_those_of_as_many_ranks_on_one_node(tmp_path, nproc):
    with Namespaces(len(nproc)) as cluster:
        training = Training(cluster, tmp_path / "run", str(len(nproc)), "toy", *SETTINGS)
        for node in reversed(range(len(nproc))):  # the node that serves the store comes last
            training.start(node, "--nproc", nproc[node])
        codes = training.wait()
    assert not any(codes.values()), training.output()
    assert same(state(training.run), on_one_node(3, tmp_path / "one"))


def test_slow_link_that_loses_packets_changes_nothing(tmp_path):
    with Namespaces(2, delay_s=0.2, loss=0.01) as cluster:
        training = Training(cluster, tmp_path / "run", "2", "toy", *SETTINGS, "train.steps=10")
        training.start(0)
        training.start(1)
        codes = training.wait()
        assert cluster.relay.dropped
    assert not any(codes.values()), training.output()
    run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "train.steps=10", "--run-dir", tmp_path / "one")
    assert same(state(training.run), state(tmp_path / "one"))


def test_nodes_join_leave_and_lose_their_link(tmp_path, slow_steps):
    with Namespaces(3) as cluster:
        training = Training(cluster, tmp_path / "run", "1:3", slow_steps, *LONG)
        training.start(0)
        training.start(1)
        training.wait_for_step(25)
        training.event(lambda: training.start(2))
        assert "3 nodes: " in training.output()
        stopped = int(re.search(r"stopped by .* at step (\d+) of", training.output(0))[1])
        assert training.starts()[-1][1] == stopped + 1  # no step is lost
        assert "a node joins: all ranks restart, including its ranks" in training.output(1)
        training.event(lambda: kill(tree(training.nodes[2].pid)))
        assert "node node2 sent no heartbeat" in training.output(0)
        assert "node node2 sent no heartbeat" in training.output(1)
        training.event(lambda: cluster.cut(1))
        assert "node node1 sent no heartbeat" in training.output(0)
        training.nodes[0].send_signal(signal.SIGTERM)
        codes = training.wait()
    assert codes == {0: 75, 1: 75, 2: -9}, training.output()
    assert "no answer for 10 s. The ranks of this node were ended" in training.output(1)
    assert "global batch 32" in training.output()
    assert "1 x cpu" in training.output()


def test_node_that_is_lost_is_waited_for_and_taken_in_again(tmp_path, slow_steps):
    with Namespaces(2) as cluster:
        training = Training(cluster, tmp_path / "run", "2", slow_steps, *LONG, "--wait-for-nodes", "25")
        training.start(0)
        training.start(1)
        training.wait_for_step(25)

        def replace():
            kill(tree(training.nodes[1].pid))
            training.start(1)

        training.event(replace)
        kill(tree(training.nodes[1].pid))
        codes = training.wait()
    assert codes == {0: 75, 1: -9}, training.output()
    assert "gave up after waiting 25 s for 1 of 2 nodes" in training.output(0)
    assert "The checkpoints are kept: the same command on all nodes resumes from the newest" in training.output(0)


def test_loss_of_the_node_with_the_store_ends_all_and_the_same_command_goes_on(tmp_path, slow_steps):
    with Namespaces(2) as cluster:
        training = Training(cluster, tmp_path / "run", "2", slow_steps, *LONG)
        training.start(0)
        training.start(1)
        training.wait_for_step(25)
        left = [pid for node in (0, 1) for pid in tree(training.nodes[node].pid)[1:]]
        training.nodes[0].kill()  # the launcher alone
        assert training.wait() == {0: -9, 1: 75}, training.output()
        assert "which holds the shared state of the nodes, is gone" in training.output(1)
        processes.wait_for(lambda: not any(map(processes.is_running, left)))

        def again():
            training.start(1)
            training.start(0)

        training.event(again)
        assert training.starts()[-1][1] > 20
        training.nodes[1].send_signal(signal.SIGINT)
        assert training.wait() == {0: 75, 1: 75}, training.output()


def test_node_that_freezes_and_wakes_joins_again(tmp_path, slow_steps):
    with Namespaces(2) as cluster:
        training = Training(cluster, tmp_path / "run", "1:2", slow_steps, *LONG, host=1)
        training.start(0)
        training.start(1)
        training.wait_for_step(25)
        frozen = tree(training.nodes[0].pid)
        kill(frozen, signal.SIGSTOP)
        processes.wait_for(lambda: "which still has the run directory" in training.output(1))
        training.event(lambda: kill(frozen, signal.SIGCONT))
        processes.wait_for(lambda: len(training.starts()) >= 3 and "a node joins" in training.output(0))
        training.wait_for_step(training.starts()[-1][1] + 3)
        for node in (0, 1):
            training.nodes[node].send_signal(signal.SIGTERM)
        assert training.wait() == {0: 75, 1: 75}, training.output()
