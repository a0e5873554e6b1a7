"""Workers: worlds of changing size, and processes that die. All tests share a pool of two processes."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.configs import config_file
from lockstep.core.checkpoint import files
from lockstep.core.errors import LockstepError
from lockstep_lab.verify import command, worker_functions
from lockstep_lab.verify import workers as module
from lockstep_lab.verify.worker_functions import Answer
from lockstep_lab.verify.workers import WorkerEnded, Workers
from tests import ranks as shared
from tests import runs
from tests.processes import HANG_S
from tests.selection import mainly


class Named(Dataset):
    """Every sample holds the ids of the process that reads it and of its parent."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([os.getpid(), os.getppid()])


def whoami():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCKSTEP_STORE", "MASTER_ADDR", "MASTER_PORT")
    return os.getpid(), {name: os.environ[name] for name in names if name in os.environ}


def together(value):
    """The sum of `value` times the rank over a real group."""
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world:
        return world.all_sum([value * world.rank])[0], torch.get_num_threads()


def loaded():
    processes = [sample.tolist() for batch in DataLoader(Named(), num_workers=1) for sample in batch]
    return os.getpid(), processes, multiprocessing.get_start_method()


def die(how):
    """As `how` says for this rank."""
    if how[int(os.environ["RANK"])] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the sheep are asleep")


def die_before_joining(how):
    """Rank 1 never comes; rank 0 waits for it."""
    if os.environ["RANK"] == "1":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return Answer(error="the sheep are asleep")
    return together(1.0)


def sleep(rank):
    if os.environ["RANK"] == str(rank):
        time.sleep(900)
    return os.getpid()


def say(text):
    print(text, flush=True)
    os.write(2, f"{text} as a fault\n".encode())


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    ranks = Workers(tmp_path_factory.mktemp("ranks") / "verify.log")
    yield ranks
    ranks.close()


def test_a_world_is_as_large_as_is_asked_for_and_processes_stay(pool):
    small, large, again = (pool.run(world, whoami) for world in (1, 2, 1))
    assert small[0][0] == large[0][0] == again[0][0] != large[1][0]
    assert [len(world) for world in (small, large, again)] == [1, 2, 1]
    stores = set()
    for world in (small, large, again):
        stores.add(world[0][1]["LOCKSTEP_STORE"])
        for rank, (_, variables) in enumerate(world):
            expected = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(world)),
                "LOCAL_WORLD_SIZE": str(len(world)),
            }
            assert variables == expected | {
                "LOCKSTEP_STORE": world[0][1]["LOCKSTEP_STORE"]
            }  # no port that another program may take
    assert len(stores) == 3
    assert "RANK" not in os.environ


def test_ranks_of_a_world_talk_to_each_other_again_and_again(pool):
    assert [answer[0] for answer in pool.run(2, together, 2.0)] == [2.0, 2.0]
    assert pool.run(1, together, 2.0) == [(0.0, 1)]
    assert [answer[0] for answer in pool.run(2, together, 3.0)] == [3.0, 3.0]


def test_loader_workers_start_as_in_a_process_of_the_users(pool):
    ((rank, processes, method),) = pool.run(1, loaded)
    assert method == multiprocessing.get_start_method()
    assert all(parent == rank != process for process, parent in processes)


def test_what_ranks_print_goes_into_the_log(pool, capfd):
    pool.run(2, say, "the cat sat")
    text = pool.log.read_text()
    assert text.count("the cat sat\n") == 2
    assert text.count("the cat sat as a fault\n") == 2
    assert capfd.readouterr() == ("", "")


def test_the_log_that_a_broken_task_is_told_of_has_its_traceback(pool):
    odd_tasks = Path(__file__).resolve().parent / "odd_tasks.py"
    settings = config_file.parse(runs.config(task={"kind": f"{odd_tasks}:Raises"})).model_dump(by_alias=True)
    with pytest.raises(LockstepError, match="the sheep are asleep") as caught:
        command.verify(settings, 2, pool.log.parent, workers=pool)
    assert caught.value.where == str(pool.log)
    log = pool.log.read_text()
    assert "Traceback" in log
    assert "odd_tasks.py" in log
    assert list(pool.log.parent.iterdir()) == [pool.log]


def test_ranks_are_in_a_session_of_their_own(pool):
    ((pid, _),) = pool.run(1, whoami)
    assert os.getsid(pid) == pid != os.getsid(0)


def test_a_rank_that_dies_is_an_ended_one_with_its_exit_code_and_is_replaced(pool):
    before = {pid for pid, _ in pool.run(2, whoami)}
    answers = pool.run(2, die, ("raised", "killed"))
    assert all(isinstance(answer, WorkerEnded) for answer in answers)
    assert [(answer.rank, answer.exit_code) for answer in answers] == [(0, 1), (1, -signal.SIGKILL)]
    assert "the sheep are asleep" in pool.log.read_text()
    assert [answer[0] for answer in pool.run(2, together, 2.0)] == [2.0, 2.0]
    assert not before & {pid for pid, _ in pool.run(2, whoami)}


@pytest.mark.exhaustive
def test_two_pools_at_once_do_not_disturb_each_other(pool):
    def many(one, value):
        return [[answer[0] for answer in one.run(2, together, value)] for _ in range(10)]

    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(many, one, value) for one, value in ((pool, 2.0), (shared._ranks, 3.0))]
        assert [one.result() for one in found] == [[[2.0, 2.0]] * 10, [[3.0, 3.0]] * 10]


@pytest.mark.parametrize("how", mainly(["killed"], ["killed", "answered"]))
def test_a_rank_that_fails_before_it_joins_does_not_keep_the_others_waiting(pool, monkeypatch, how):
    monkeypatch.setattr(module, "_TIMEOUT_AFTER_FAILURE_S", 1.0)
    waiting, failed = pool.run(2, die_before_joining, how)
    assert str(waiting) == "rank 0 still ran 1 s after rank 1 had failed"
    assert (
        str(failed) == "the process of rank 1 ended with exit code -9"
        if how == "killed"
        else failed.error == "the sheep are asleep"
    )
    assert [answer[0] for answer in pool.run(2, together, 2.0)] == [2.0, 2.0]


def test_a_process_that_is_gone_when_it_is_asked_is_an_ended_rank(pool, monkeypatch):
    pool.run(1, whoami)
    process = pool._workers[0][0]
    os.kill(process.pid, signal.SIGSTOP)  # alive, until it is asked
    send = pool._send
    monkeypatch.setattr(pool, "_send", lambda *arguments: (send(*arguments), process.kill()))
    (answer,) = pool.run(1, whoami)
    monkeypatch.undo()
    assert (answer.exit_code, answer.reason) == (-signal.SIGKILL, "")


@pytest.mark.exhaustive
def test_a_rank_that_does_not_answer_in_time_is_killed_and_closing_ends_the_others(pool, monkeypatch):
    """The time is over when the other rank has answered."""
    wait = module.wait
    monkeypatch.setattr(module, "wait", lambda waiting, timeout: wait(waiting) if len(waiting) == 2 else [])
    answers = pool.run(2, sleep, 1, timeout_s=1.0)
    monkeypatch.undo()
    assert (answers[1].rank, answers[1].exit_code, str(answers[1])) == (
        1,
        -signal.SIGKILL,
        "rank 1 gave no answer within 1 s",
    )
    assert pool.run(1, whoami)[0][0] == answers[0]  # the other one goes on
    folder = pool._folder
    assert folder.is_dir()
    pool.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(answers[0], 0)
    pool.close()  # once more does no harm


def test_a_slow_disk_writes_after_the_next_step(monkeypatch):
    disk, written = worker_functions.SlowDisk(last=8), []
    monkeypatch.setattr(disk, "_write", lambda *arguments: written.append((arguments, disk.step)))
    monkeypatch.setattr(files, "write_share", files.write_share)  # puts it back after this test
    with disk:
        disk.step = 1  # the steps after which the recorder was called, while that of step 2 is saved
        thread = threading.Thread(target=files.write_share, args=("path", {}))
        thread.start()
        assert not written
        disk.step = 2
        thread.join(0.02)
        assert not written
        disk.step = 3
        thread.join(HANG_S)
        assert written == [(("path", {}), 3)]
        disk.step = 7
        files.write_share("last", {})  # no step follows
    assert files.write_share is disk._write
