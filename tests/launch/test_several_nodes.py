"""Two launchers on this machine as two nodes, and what is said where nodes do not fit together."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.core.errors import Preempted, UsageError
from lockstep.launch import launcher, node_address, node_session, several_nodes
from lockstep.launch.decision import Action, Decision, Ending, RankFailure, StartHistory
from lockstep.launch.launcher import Forwarding, start_until_done
from lockstep.launch.node_address import GLOO_INTERFACE, Endpoint, MissingNodesError, ProcessClock
from lockstep.launch.node_session import BoundedStore, Pulse, RendezvousParameters, Session, StoreLostError
from lockstep.launch.several_nodes import SeveralNodes
from tests import processes, rank_cases
from tests.processes import HANG_S, launched
from tests.ranks import run_ranks
from tests.test_recovery import SETTINGS, same, state


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two_nodes(folder):
    """Train on two nodes of one rank each. Rank 1 is killed at step 20."""
    port = free_port()
    options = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--run-dir", folder / "run"]
    begun = []
    for name in ("a", "b"):
        command = processes.command("train", "toy", *SETTINGS, *options)
        variables = {"LOCKSTEP_NODE": name, "LOCKSTEP_FAIL_AT": f"1:20:in-share:kill:{folder}/once"}
        begun.append(
            subprocess.Popen(
                command,
                env=processes.environment(**variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        )
    return [(process.communicate(timeout=HANG_S)[0], process.returncode) for process in begun]


@launched(two_nodes)
def test_two_nodes_train_as_one_and_name_the_node_of_a_killed_rank(launch, tmp_path):
    (done,) = launch.done
    for output, code in done:
        assert code == 0, output
        assert re.search(r"2 nodes: [ab] \(127.0.0.1, rank 0\), [ab] \(127.0.0.1, rank 1\)", output)
        assert re.search(r"rank 1 on node [ab] was killed by signal 9", output)
        assert "failed at step 20: restart 1 of 3" in output
    run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", tmp_path)
    assert same(state(launch.folder / "run"), state(tmp_path))
    assert json.loads((launch.folder / "run" / "environment.json").read_text())["world"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "0"], "'0' is not a number of nodes"),
        (["--nnodes", "4:1"], "'4:1' is not a number of nodes"),
        (["--nnodes", "2"], "give --rendezvous HOST:PORT on all nodes"),
        (["--nnodes", "2", "--rendezvous", "node0:port"], "'node0:port' is not the address of a node"),
        (["--rendezvous", "node0"], "the number of nodes is missing"),
        (["--nnodes", "2", "--rendezvous", "node0", "--wait-for-nodes", "inf"], "Invalid value for '--wait-for-nodes'"),
    ],
)
def test_wrong_options_are_refused(options, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "toy", *options])
    assert done.exit_code == 2
    assert words in done.stderr


def nodes(port, **other):
    made = RendezvousParameters(
        2, 2, Endpoint("127.0.0.1", port), run_id="mine", wait_s=HANG_S, keys={"batch.global": 64}
    )
    return replace(made, **other)


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    monkeypatch.setenv("LOCKSTEP_NODE", "here")
    return free_port()


@pytest.fixture
def session(port):
    with contextlib.closing(Session(nodes(port), 1)) as made:
        yield made


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"most": 3}, "--nnodes: '2' there, '2:3' here"),
        ({"keys": {"batch.global": 32}}, "batch.global: 64 there, 32 here"),
        ({"run_id": "another"}, "belongs to a different run: --rendezvous-id: 'mine' there, 'another' here"),
    ],
)
def test_a_node_with_another_command_says_what_differs(session, port, other, words):
    with pytest.raises(UsageError) as caught:
        Session(nodes(port, **other), 1)
    assert words in str(caught.value)
    assert re.search(r"process \d+ on here", str(caught.value))


def test_another_version_is_named(session, port, monkeypatch):
    monkeypatch.setattr("lockstep.__version__", "0.0.1")
    with pytest.raises(UsageError, match=r"version of Lockstep: '.*' there, '0.0.1' here"):
        Session(nodes(port), 1)


def test_a_host_that_nobody_reaches_is_waited_for_and_named(port, monkeypatch, capfd):
    monkeypatch.setenv(node_session.SERVES, "0")
    monkeypatch.setattr(node_address, "_TELL_AFTER_S", 0.1)
    monkeypatch.setattr(node_address, "ProcessClock", lambda: Mock(look=Mock(side_effect=itertools.count(0.0, 0.2))))
    with pytest.raises(MissingNodesError) as caught:
        Session(nodes(port, wait_s=0.6), 1)
    assert f"gave up after waiting 0.6 s for the node at 127.0.0.1:{port}" in str(caught.value)
    assert "firewall" in str(caught.value)
    assert f"waiting for the node at 127.0.0.1:{port}" in capfd.readouterr().err


def test_a_name_that_nobody_knows_is_waited_for_and_named(port):
    with pytest.raises(MissingNodesError, match=r"the host name no-such-host.invalid to resolve"):
        Session(nodes(port, endpoint=Endpoint("no-such-host.invalid", port), wait_s=0.6), 1)


def test_a_listener_that_is_no_launcher_is_named(port, monkeypatch):
    monkeypatch.setattr(node_session, "gone_after_s", lambda: 0.5)
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        with pytest.raises(UsageError, match="is not a launcher of this command"):
            Session(nodes(port), 1)


def test_no_call_waits_for_ever(monkeypatch):
    monkeypatch.setattr(node_session, "gone_after_s", lambda: 0.3)
    store, over = BoundedStore(HashStore, "node0:29400"), threading.Event()
    with pytest.raises(StoreLostError, match=r"the node at node0:29400, .* is gone: no answer for 0.3 s"):
        store.call(lambda store: over.wait())
    over.set()


def test_time_stands_still_for_a_process_that_is_frozen(monkeypatch):
    clock, later = ProcessClock(), time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert clock.look() <= 1.0


def test_signs_of_life_and_news_are_found(monkeypatch):
    monkeypatch.setattr(node_session, "_BEAT_S", 0.01)
    store = HashStore()
    pulse = Pulse(lambda: store, 1)
    pulse.limit = 5
    pulse.watch([1, 2], "0/over", "0/waiting")
    processes.wait_for(lambda: pulse.gone() == [2])
    assert not pulse.has_joining
    store.set("0/waiting", "1")
    processes.wait_for(lambda: pulse.has_joining)
    assert not pulse.is_over
    store.set("0/over", "1")
    processes.wait_for(lambda: pulse.is_over)
    pulse.watch([2])
    assert not pulse.is_over
    store.set("stop", "SIGTERM on node b")
    processes.wait_for(lambda: pulse.stopped_by == "SIGTERM on node b")
    assert pulse.silence_s() < 1
    pulse.close()


def test_a_request_to_stop_that_is_told_again_and_again_makes_no_other_node_gone(monkeypatch):
    # Launchers that wait for the ranks of other nodes tell it many times a second.
    limit, beats = Pulse(HashStore, 1).limit, []
    monkeypatch.setattr(node_session, "_BEAT_S", HANG_S)  # all beats are because of the request

    class Counting(HashStore):
        def add(self, key, value):
            beats.append(key)
            return super().add(key, value)

    store = Counting()
    pulse = Pulse(lambda: store, 1)
    pulse.limit = limit
    pulse.watch([2])
    for _ in range(2 * limit):
        pulse.ask_to_stop("SIGUSR1 on node a")
        time.sleep(0.01)
    processes.wait_for(lambda: store.check(["stop"]))
    pulse.close()
    assert beats.count("alive/2") < limit / 2
    assert not pulse.gone()
    assert store.get("stop") == b"SIGUSR1 on node a"


def test_a_request_to_stop_waits_for_the_ranks_once_the_nodes_have_met(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop = Forwarding()
    stop.defers = True
    stop._handle(signal.SIGUSR1, None)
    assert stop.asked
    stop = Forwarding()
    with pytest.raises(Preempted):
        stop._handle(signal.SIGUSR1, None)


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1", "0"])
def test_a_wrong_time_until_a_node_counts_as_gone_is_refused(text, port, monkeypatch):
    monkeypatch.setenv(node_session.GONE_AFTER, text)
    with pytest.raises(UsageError, match="not a number of seconds"):
        Session(nodes(port), 1)
    monkeypatch.setenv(node_session.GONE_AFTER, "1")
    assert node_session.gone_after_s() == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_run_stopped_is_told_on_every_node(rank, capfd, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    text = "stopped by SIGTERM on node a at step 63 of 100, saved"
    run = SeveralNodes(SimpleNamespace(name="a"), 3, Forwarding())
    run.first, run.rank = 0, rank
    monkeypatch.setattr(run, "meet", lambda number: "start")
    monkeypatch.setattr(launcher, "_run_once", lambda *_: "ending")
    monkeypatch.setattr(run, "_tell", lambda ending: None)
    monkeypatch.setattr(run, "_decision_of", lambda number: Decision(Action.STOP, StartHistory(), text))
    with pytest.raises(Preempted):
        start_until_done(run, [], 1, print, run.stop)
    assert capfd.readouterr().err == (f"{text}\n" if rank else "")  # the log of rank 0 says so on the first node


@pytest.fixture
def launchers(port, monkeypatch):
    """Makes launchers of 2 or 3 nodes."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(several_nodes, "_LAST_CALL_S", 0.0)
    with contextlib.ExitStack() as stack:
        yield lambda: SeveralNodes(
            stack.enter_context(contextlib.closing(Session(nodes(port, most=3), 1))), 3, Forwarding()
        )


def test_nodes_meet_and_one_that_comes_later_waits_for_the_next_start(launchers):
    first, second, late = (launchers() for _ in range(3))
    with ThreadPoolExecutor() as pool:
        starts = list(pool.map(lambda one: one.meet(0), (first, second)))
        assert [(start.rank, start.sizes) for start in starts] == [(0, [1, 1]), (1, [1, 1])]
        assert starts[0].port == starts[1].port
        waits = pool.submit(late.meet, 0)
        processes.wait_for(lambda: first.session.pulse.has_joining)
        assert not waits.done()
        stopped = RankFailure(0, Preempted.exit_code, 1, {"text": "stopped, saved"})
        second._set_verdict(0, Ending((stopped,), joining=True))
        assert waits.result() is None
        decisions = [one.agree(0, None) for one in (first, second, late)]
        assert {decision.text for decision in decisions} == {"a node joins: all ranks restart, including its ranks"}
        assert launchers().first == 1
        starts = list(pool.map(lambda one: one.meet(1), (first, second, late)))
    assert [start.rank for start in starts] == [0, 1, 2]


def test_a_node_that_came_and_went_is_known_to_all(launchers, monkeypatch):
    monkeypatch.setattr(several_nodes, "gone_after_s", lambda: 0.1)
    here, gone = launchers(), launchers()
    gone.session.notes.call(lambda store: store.append("0/here", f"{gone.session.id} "))
    assert here.meet(0) is None
    for one in (here, gone):
        assert one.agree(0, None).text.startswith("node which came and went sent no heartbeat")
    assert not here.members
