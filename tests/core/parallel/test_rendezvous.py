"""Where ranks meet: nobody meets the dead of an earlier start, and nobody waits for ever."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.core.errors import RankError, UsageError
from lockstep.core.parallel import rendezvous
from lockstep.core.parallel.failure import FailureBoard
from tests import rank_cases
from tests.processes import HANG_S, environment, wait_for


def meet(store, ranks, size, timeout_s=HANG_S):
    """For each of `ranks`, the value under its own rank in its part of the store, or the error without a part."""

    def one(rank):
        try:
            part = rendezvous.own_part(store, rank, size, timeout_s)
        except RankError as error:
            return error
        part.set(f"rank {rank}", str(rank))
        part.wait([f"rank {other}" for other in ranks])
        return [part.get(f"rank {other}").decode() for other in ranks]

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_ranks_of_a_start_find_one_part_of_the_store():
    assert meet(dist.HashStore(), range(4), 4) == [["0", "1", "2", "3"]] * 4


def test_a_part_is_empty_at_each_start_though_the_store_stays():
    store = dist.HashStore()
    for _ in range(3):
        parts = []
        ranks = [
            threading.Thread(
                target=lambda rank=rank, parts=parts: parts.append(rendezvous.own_part(store, rank, 2, HANG_S))
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(HANG_S)
        one, other = parts
        assert not one.check(["address"])
        one.set("address", "of a process that will be gone")
        assert other.check(["address"])


@pytest.mark.parametrize("came", [(), (1,), (2,), (1, 2)])
def test_ranks_that_come_before_rank_0_do_not_stay_with_the_one_of_an_earlier_start(came):
    """Whether that start came to its end, or some rank was killed before it said hello."""
    store = dist.HashStore()
    old = [threading.Thread(target=lambda rank=rank: meet(store, [rank], 3, 0.3)) for rank in (0, *came)]
    for rank in old:
        rank.start()
    for rank in old:
        rank.join()
    assert store.check(["lockstep/name"])
    early = ThreadPoolExecutor(2)
    waiting = [early.submit(rendezvous.own_part, store, rank, 3, HANG_S) for rank in (1, 2)]
    assert not any(one.done() for one in waiting)
    mine = rendezvous.own_part(store, 0, 3, HANG_S)
    mine.set("here", "yes")
    assert [one.result(HANG_S).get("here") for one in waiting] == [b"yes", b"yes"]


def test_who_is_missing_is_named_in_time(monkeypatch):
    (error,) = meet(dist.HashStore(), [0], 3, 0.3)
    assert str(error).startswith("ranks 1, 2 did not join within 0.3 s")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error.remedy
    (error,) = meet(dist.HashStore(), [2], 3, 0.3)
    assert str(error).startswith("rank 0 did not join within 0.3 s")

    rest = rendezvous._Patience.rest

    def until_two_have_met(patience, missing):
        if missing in ("rank 1", "some of the other ranks"):
            patience.timeout_s = 0.0
        rest(patience, missing)

    monkeypatch.setattr(rendezvous._Patience, "rest", until_two_have_met)
    first, second = meet(dist.HashStore(), [0, 2], 3)
    assert str(first).startswith("rank 1 did not join")
    assert str(second).startswith("some of the other ranks did not join")


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.delenv(rendezvous.FILE, raising=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(RankError, match="rank 1 did not meet the other ranks") as caught:
            rendezvous.store_of_ranks(1, 2, 0.5)
    assert "MASTER_ADDR=127.0.0.1" in caught.value.where


def test_an_environment_that_names_no_place_is_refused(monkeypatch):
    for name in (rendezvous.FILE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR or MASTER_PORT is not"):
        rendezvous.store_of_ranks(0, 2, 0.5)


def test_a_lost_connection_is_not_blamed_on_memory_alone():
    with rank_cases.impatient():
        board = FailureBoard(dist.HashStore(), 0, 2)
        error = board.explain(
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection reset by peer")
        )
        board.close()
    assert "lost the connection to another rank" in error.what
    assert error.remedy.startswith(
        "the process of that rank was killed, or its machine or the network between them failed"
    )


@pytest.mark.exhaustive
def test_a_killed_worker_comes_back_under_the_users_own_torchrun_on_two_nodes(tmp_path):
    """Both agents on this machine. Without a part of its own in the agents' store, hardly any start came back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kills, run = 3, tmp_path / "run"
    nodes = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--local-addr",
        "127.0.0.1",
    ]
    settings = [
        "train.steps=1000000",
        "train.eval_every_epochs=null",
        "log.every_steps=20",
        "log.writers=[text_log,json_lines]",
        "checkpoint.every_steps=100",
    ]
    worker = ["-m", "lockstep", "train", "toy", *settings, "parallel.timeout_s=20", "--run-dir", str(run)]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "--max-restarts", str(2 * kills), *worker]
    agents = []
    for number in (0, 1):
        with (tmp_path / f"agent-{number}").open("w") as log:
            agents.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
                )
            )

    def logged():
        return (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0

    try:
        for number in range(kills + 1):
            before = logged()
            wait_for(lambda before=before: logged() > before + 2 or any(agent.poll() is not None for agent in agents))
            assert [agent.poll() for agent in agents] == [None, None], (tmp_path / "agent-0").read_text()[-3000:]
            if number < kills:
                agent = random.choice(agents)
                (pid,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                os.kill(int(pid), signal.SIGKILL)
    finally:
        for agent in agents:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def test_a_rank_that_waits_says_for_whom_and_why(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "TELL_S", 0.05)
    for name in ("LOCKSTEP_LAUNCHED", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RankError, match=r"ranks 1, 2, 3 did not join within 0\.3 s"):
        rendezvous._store_of_rank_0("127.0.0.1", port, 0, 4, 0.3)
    said = capfd.readouterr().err
    assert "rank 0 waits for ranks 1, 2, 3, because WORLD_SIZE=4 is in the environment" in said
    assert "unset RANK WORLD_SIZE LOCAL_RANK" in said
    assert said.count("waits for ranks 1, 2, 3") == 1

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # of torchrun: no variable is left over
    assert isinstance(meet(dist.HashStore(), [0], 2, timeout_s=0.3)[0], RankError)
    said = capfd.readouterr().err
    assert "rank 0 waits for rank 1, because WORLD_SIZE=2 is in the environment\n" in said


def test_ranks_that_torchrun_has_not_started_meet_in_the_store_of_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor(3) as threads:
        stores = list(
            threads.map(lambda rank: rendezvous._store_of_rank_0("127.0.0.1", port, rank, 3, HANG_S), range(3))
        )
    stores[1].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3


def test_a_rank_that_waits_inside_the_store_says_so_as_well(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "TELL_S", 0.01)
    with rendezvous._said("rank 1 waits for rank 0"):
        wait_for(lambda: "rank 1 waits for rank 0" in capfd.readouterr().err)


def test_variables_without_a_place_to_meet_say_how_to_unset_them(monkeypatch):
    expected = "RANK=0 and WORLD_SIZE=4 ask for 4 ranks, but MASTER_ADDR or MASTER_PORT is not set"
    with pytest.raises(UsageError, match=expected) as caught:
        rendezvous._make_store(None, None, None, 0, 4, 1.0)
    assert "unset RANK WORLD_SIZE" in caught.value.remedy
