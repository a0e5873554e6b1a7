"""Another process can read the progress of a rank, even when the rank is dead."""

import json
import os
import signal
import subprocess
import sys

import pytest

from lockstep.core.parallel import heartbeat, launched
from lockstep.core.parallel.heartbeat import Heartbeat, Phase

RANK = """
import sys
from lockstep.core.parallel import heartbeat
own = heartbeat.own()
assert own is heartbeat.own()
assert own.step == -1
own.step = 2**40 + 7
own.enter(heartbeat.Phase.SAVING)
own.beats += 41
print("torch" in sys.modules, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fresh(monkeypatch):
    """`own` as in a new process."""
    return heartbeat.own.__wrapped__


def start(folder, rank):
    environment = os.environ | {launched.FOLDER: str(folder), "RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, "-c", RANK], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_heart_survives_the_kill_of_its_process(tmp_path):
    process = start(tmp_path, 3)
    assert process.stdout.readline().strip() == "False"  # it imports no torch
    (living,) = heartbeat.all_in(tmp_path)
    assert heartbeat.is_alive(living.pid)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (found,) = heartbeat.all_in(tmp_path)
    assert (found.pid, found.step, Phase(found.phase), found.beats) == (process.pid, 2**40 + 7, Phase.SAVING, 42)
    assert not heartbeat.is_alive(found.pid)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3"]


def test_hearts_of_all_ranks_are_found_and_nothing_else(tmp_path):
    for rank in (0, 1, 10):
        one = Heartbeat(pid=100 + rank, step=rank)
        (tmp_path / f"rank-{rank}").write_bytes(bytes(one))
    (tmp_path / "rank-2").write_bytes(b"")  # a rank that is just making its own
    (tmp_path / "stop").write_text("SIGTERM")
    assert sorted(one.pid for one in heartbeat.all_in(tmp_path)) == [100, 101, 110]
    assert heartbeat.all_in(tmp_path / "nowhere") == []


def test_what_was_read_is_of_that_moment(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    own = fresh()
    own.step = 5
    (before,) = heartbeat.all_in(tmp_path)
    own.step = 6
    (after,) = heartbeat.all_in(tmp_path)
    assert (before.step, after.step) == (5, 6)
    after.step = 9
    assert own.step == 6


def test_without_a_launcher_it_is_in_memory(monkeypatch, fresh, tmp_path):
    monkeypatch.delenv(launched.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    own = fresh()
    assert (own.pid, own.step, own.phase, own.beats) == (os.getpid(), -1, Phase.STARTING, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_new_start_forgets_the_heart_before(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "rank-0").write_bytes(bytes(Heartbeat(pid=1, step=99, phase=3, beats=12)))
    fresh()
    (found,) = heartbeat.all_in(tmp_path)
    assert (found.pid, found.step, found.phase, found.beats) == (os.getpid(), -1, 0, 0)


def test_another_phase_is_a_sign_of_life():
    one = Heartbeat()
    for count, phase in enumerate(Phase, 1):
        one.enter(phase)
        assert (one.phase, one.beats) == (phase, count)


def test_a_process_of_another_user_is_alive(monkeypatch):
    def kill(pid, number):
        assert number == 0
        raise PermissionError

    assert heartbeat.is_alive(os.getpid())
    monkeypatch.setattr(os, "kill", kill)
    assert heartbeat.is_alive(1)


@pytest.mark.parametrize("variable", [launched.FOLDER, "TORCHELASTIC_RUN_ID"])
def test_only_who_was_started_by_a_launcher_can_lose_it(monkeypatch, variable):
    for name in (launched.FOLDER, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not heartbeat.is_orphan()
    monkeypatch.setattr(os, "getppid", lambda: 1 if heartbeat._parent != 1 else 2)
    assert not heartbeat.is_orphan()  # a shell that ends leaves its job running
    monkeypatch.setenv(variable, "x")
    assert heartbeat.is_orphan()


def test_a_rank_without_its_launcher_knows(tmp_path):
    orphan = (
        "import sys; from lockstep.core.parallel.heartbeat import is_orphan; "
        "print(is_orphan(), flush=True); sys.stdin.read(); print(is_orphan())"
    )
    launcher = (
        "import json, subprocess, sys; "
        "p = subprocess.Popen([sys.executable, '-c', json.loads(sys.argv[1])]); sys.stdin.readline()"
    )
    environment = os.environ | {launched.FOLDER: str(tmp_path)}
    command = [sys.executable, "-c", launcher, json.dumps(orphan)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "False"
    process.kill()
    process.wait()
    process.stdin.close()
    assert process.stdout.readline().strip() == "True"
    process.stdout.close()
