"""Ranks that hang: what counts as life, what the report says of collectives, and failures whose groups never end."""

import ctypes
import datetime
import faulthandler
import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import lockstep
from lockstep import Trainer
from lockstep.core.errors import MemoryShortage
from lockstep.core.parallel import failure, heartbeat, launched, torch_internals, world
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.torch_internals import MainThread
from lockstep.core.parallel.world import World, join_world
from lockstep.launch import flight_recorder, watchdog
from tests import own_tasks, ranks, runs
from tests.processes import HANG_S
from tests.ranks import run_ranks

# ---- life


def test_main_thread_inside_a_c_function_does_not_move():
    main, answers = MainThread(), []
    reading, writing = os.pipe()

    def look():
        while len(answers) < 4 or any(answers[-2:]):  # the first answers may come before the call
            answers.append(main.has_moved())
            time.sleep(0.002)
        os.write(writing, b".")

    thread = threading.Thread(target=look)
    thread.start()
    os.read(reading, 1)
    thread.join()
    assert main.has_moved()
    os.close(reading)
    os.close(writing)


def alone():
    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture
def reported(monkeypatch, tmp_path):
    """A watchdog with a timeout of 0.4 s, and the event that it would report a hang."""
    event = threading.Event()
    monkeypatch.setattr(watchdog, "_LENIENCE", 100)
    monkeypatch.setattr(watchdog, "_BUSY", 0.0)  # other processes may leave little of the CPU
    monkeypatch.setattr(watchdog.Watchdog, "_report", lambda self: (event.set(), self.closed.set()))
    made = watchdog.Watchdog(alone(), None, timeout_s=0.4, folder=tmp_path / "none")
    yield event
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="spins in a lock of glibc")
def test_thread_that_spins_in_a_c_function_is_no_sign_of_life(reported):
    """As cudaStreamSynchronize does: it uses the CPU and does not return."""
    libc, lock = ctypes.CDLL(None), ctypes.c_int()
    libc.pthread_spin_init(ctypes.byref(lock), 0)
    libc.pthread_spin_lock(ctypes.byref(lock))
    found = []

    def unlock():
        found.append(reported.wait(HANG_S))
        libc.pthread_spin_unlock(ctypes.byref(lock))

    thread = threading.Thread(target=unlock)
    thread.start()
    libc.pthread_spin_lock(ctypes.byref(lock))
    thread.join()
    assert found == [True]


class Simulation:
    """A watchdog with a timeout of 10 s that looks once a second, on a clock that moves when it looks."""

    def __init__(self, monkeypatch, tmp_path):
        self.seconds, self.cpu_s, self.moves = 0.0, 0.0, True
        self.hung_at = None
        clock = SimpleNamespace(monotonic=lambda: self.seconds, clock_gettime=lambda _: self.cpu_s)
        clock.pthread_getcpuclockid = lambda _: None
        monkeypatch.setattr(watchdog, "time", clock)
        monkeypatch.setattr(watchdog, "MainThread", lambda: SimpleNamespace(has_moved=lambda: self.moves))
        monkeypatch.setattr(watchdog, "faulthandler", mock.Mock())
        monkeypatch.setattr(watchdog.threading, "Thread", mock.Mock())
        monkeypatch.setattr(watchdog.Watchdog, "_report", self.report)
        self.watchdog = watchdog.Watchdog(alone(), None, timeout_s=10, folder=tmp_path)
        self.heartbeat = self.watchdog.heartbeat
        self.watchdog.closed = self

    def report(self):
        self.hung_at = self.seconds

    def wait(self, tick_s):
        """In the place of an event: the next second."""
        if self.hung_at is not None or self.seconds >= self.end:
            return True
        self.seconds += tick_s
        self.cpu_s += tick_s * self.share
        return False

    def run(self, seconds, share, phase=None):
        """The second at which a hang is declared, while the main thread gets this share of a core; None: never."""
        if phase is not None:
            self.heartbeat.enter(phase)
        self.share, self.end = share, self.seconds + seconds
        self.watchdog._watch()
        return self.hung_at


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.TRAINING])
def test_who_computes_in_python_while_it_starts_or_evaluates_is_slow_for_six_timeouts(monkeypatch, tmp_path, phase):
    here = Simulation(monkeypatch, tmp_path)
    assert here.run(69, 0.05, phase) is None
    assert here.run(69, 0.05, phase) is None  # a beat is a sign of life
    assert here.run(60, 0.05) == 69 + 70


@pytest.mark.parametrize(
    ("phase", "share", "moves"),
    [(Phase.TRAINING, 1.0, True), (Phase.STARTING, 0.0, True), (Phase.EVALUATING, 1.0, False)],
)
def test_a_hang_is_declared_after_the_timeout(monkeypatch, tmp_path, phase, share, moves):
    """In training, only batches count. Else who waits, or stays inside one function of C, does not compute."""
    here = Simulation(monkeypatch, tmp_path)
    here.moves = moves
    assert here.run(10, share, phase) is None
    assert here.run(10, share, phase) is None
    assert here.run(20, share) == 21  # the beat at 10 s was seen at 11 s


class NotesPhases(own_tasks.Plain):
    def note(self, what):
        self.seen = getattr(self, "seen", set()) | {(what, Phase(heartbeat.own().phase).name)}

    def model(self):
        self.note("model")
        return super().model()

    def loss(self, model, batch):
        self.note("training" if model.training else "evaluation")
        return super().loss(model, batch)


def phases(folder):
    task = NotesPhases(eval_length=4)
    Trainer(runs.config(train={"steps": 3, "eval_every_steps": 3}), run_dir=folder, quiet=True).fit(task)
    return task.seen


def test_phases_are_those_in_which_a_rank_may_be_slow(tmp_path):
    """Also in a process that has trained before, as in a notebook."""
    for number in range(2):
        (seen,) = run_ranks(1, phases, tmp_path / str(number))
        assert seen >= {("model", "STARTING"), ("training", "TRAINING"), ("evaluation", "EVALUATING")}
        assert not seen & {("model", "TRAINING"), ("evaluation", "TRAINING"), ("training", "EVALUATING")}


def holding_the_lock_of_the_interpreter(folder, output):
    """The watchdog sets the clock of its last resort, as always, and then neither it nor any other thread can run."""
    real, is_set = faulthandler.dump_traceback_later, threading.Event()

    def dump_soon(timeout, **how):
        assert timeout == 100 + 3 * watchdog._ANSWER_S
        real(0.1, **how)
        is_set.set()
        threading.Event().wait()

    faulthandler.dump_traceback_later = dump_soon
    with open(output, "w") as file:
        os.dup2(file.fileno(), 2)
    watchdog.Watchdog(alone(), None, timeout_s=100, folder=Path(folder)).tick_s = 0.01
    is_set.wait()
    ctypes.PyDLL(None).pause()


def test_stacks_of_a_rank_that_cannot_report_are_on_stderr_and_no_file_is_left_of_it(tmp_path):
    """Nobody could remove a file of a rank that is killed, and a rank that is started again would empty it."""
    run, output = tmp_path / "run", tmp_path / "stderr"
    run.mkdir()
    (ended,) = ranks._ranks.run(1, holding_the_lock_of_the_interpreter, str(run), str(output))
    assert ended.exit_code == 1
    text = output.read_text()
    assert text.startswith("Timeout (")
    assert "in holding_the_lock_of_the_interpreter" in text
    assert "in _watch" in text
    assert not list(run.iterdir())


def test_a_report_begins_below_the_command(tmp_path):
    made = watchdog.Watchdog(alone(), None, timeout_s=100, folder=tmp_path)
    made.close()
    scope = {"stack": made._stack}
    command = Path(lockstep.__file__).parent / "cli" / "train.py"
    exec(compile("text = stack()", str(command), "exec"), scope)
    assert "in _stack" in scope["text"]
    assert "test_a_report_begins" not in scope["text"]


# ---- collectives in the report


def test_last_collectives_are_recorded_for_each_group():
    (text,) = run_ranks(1, recorded)
    entries = json.loads(text)["default_pg (0)"]  # the process may have had other groups before
    assert entries[-1]["name"] == "gloo:all_reduce"
    assert entries[-1]["sizes"] == [[2, 3]]
    assert entries[-1]["state"] == "completed"
    assert entries[-1]["number"] == entries[-2]["number"] + 1


def recorded():
    flight_recorder.switch_on()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1))
    dist.all_reduce(torch.zeros(2, 3))
    deadline = time.monotonic() + HANG_S
    while '"scheduled"' in (text := flight_recorder.of_this_rank()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread of gloo's notes the end of a collective
    dist.destroy_process_group()
    return text


def test_what_differs_between_ranks_is_named():
    def text(*entries):
        keys = ("name", "number", "sizes", "dtypes", "state")
        return json.dumps({"default_pg (0)": [dict(zip(keys, entry, strict=True)) for entry in entries]})

    reduce = ("nccl:all_reduce", 17, [[3, 4]], ["Float"], "started")
    other = ("nccl:all_reduce", 17, [[3, 5]], ["Float"], "scheduled")
    before = ("nccl:broadcast", 16, [[9]], ["Byte"], "completed")
    told = flight_recorder.describe({0: text(before, reduce), 1: text(before), 2: text(before, other), 3: ""})
    assert (
        "default_pg (0): rank 1 made only 16 collectives, and ranks 0, 2 made 17: "
        "rank 1 did not reach nccl:all_reduce 17\n"
    ) in told
    assert (
        "number 17 is not the same collective on all ranks: "
        "nccl:all_reduce [3, 4] Float on rank 0, nccl:all_reduce [3, 5] Float on rank 2\n"
    ) in told
    assert "rank 0, default_pg (0): nccl:broadcast 16 [9] Byte done; nccl:all_reduce 17 [3, 4] Float NOT DONE" in told
    assert "no answer from rank 3" in told
    # A rank waits in host memory, the other on the GPU. Each backend counts for itself.
    on_host = ("gloo:all_reduce", 3, [[1]], ["Double"], "scheduled")
    told = flight_recorder.describe({0: text(on_host, reduce), 1: text(before)})
    assert "default_pg (0): rank 1 made only 16 collectives, and rank 0 made 17" in told
    assert "rank 0, default_pg (0): gloo:all_reduce 3 [1] Double NOT DONE, scheduled" in told
    told = flight_recorder.describe({0: text(on_host), 1: text(before)})
    assert "made only" not in told
    assert flight_recorder.describe({0: "{}", 1: ""}) == ""
    same = flight_recorder.describe({0: text(reduce), 1: text(reduce)})
    assert "did not reach" not in same
    assert "not the same" not in same


def test_recorder_is_switched_on_before_the_first_group(monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    flight_recorder.switch_on()
    assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    flight_recorder.switch_on()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


# ---- failures


def failing(how):
    """Joins with a group that can never be given up, and fails."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = how
    world._ABORT_S = 0.2
    torch_internals.abort_groups = lambda: threading.Event().wait()
    with join_world("cpu"):
        raise ValueError("the cat sat on the cable")


def test_failure_is_reported_and_the_process_ends_where_the_groups_never_end(tmp_path):
    told, ended = ranks._ranks.run(2, failing_on_rank_1, str(tmp_path / "error.json"))
    assert "rank 1 failed" in told
    assert "the cat sat on the cable" in told
    assert ended.exit_code == 1
    report = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "ValueError: the cat sat on the cable" in report["message"]


def failing_on_rank_1(path):
    if os.environ["RANK"] == "1":
        return failing(path)
    try:
        with join_world("cpu") as here:
            here.all_sum([1.0])
    except Exception as error:
        return str(error)


def order_of_leaving():
    """What is still alive while the groups are left."""
    seen = []
    leave = dist.destroy_process_group

    def destroy():
        seen.append(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep-")))
        leave()

    dist.destroy_process_group = destroy
    try:
        with join_world("cpu", watch=partial(watchdog.Watchdog, timeout_s=600, folder=Path("/nowhere"))):
            pass
    finally:
        dist.destroy_process_group = leave
    return seen, dist.is_initialized()


def test_watchdog_and_failure_board_live_until_the_groups_are_gone():
    for answer in run_ranks(2, order_of_leaving):
        assert answer == ([["lockstep-failures", "lockstep-watchdog"]], False)


def test_restart_that_does_something_else_is_known_to_all_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(failure.FailureBoard, "_watch", lambda board: None)
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    store = HashStore()
    first, second = (failure.FailureBoard(store, rank, 2) for rank in range(2))
    assert first.explain(MemoryShortage("out of memory")) is None
    second.first = json.loads(store.get("failure"))
    error = second._error_of(second.first)
    assert error.retries_differently
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    launched.report_failure(error, str(error))
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["retries_differently"]


# ---- timeouts of groups


def timeouts_of_a_hybrid_mesh():
    from lockstep.core.parallel.fsdp import make_mesh

    with join_world("cpu", timeout_s=77) as here:
        mesh = make_mesh(here, {"replicate": 2, "shard": 1})
        return [torch_internals.timeouts(mesh.get_group(name)) for name in ("replicate", "shard")]


def test_groups_of_a_hybrid_mesh_have_the_timeout_of_the_world():
    for found in run_ranks(2, timeouts_of_a_hybrid_mesh):
        assert found == [{datetime.timedelta(seconds=77)}] * 2


def test_the_last_collectives_of_each_backend_of_a_group_are_kept(monkeypatch):
    about = {"process_group": ["0", "default_pg"], "is_p2p": False, "input_sizes": [[1]], "input_dtypes": ["Double"]}
    about |= {"state": "scheduled", "retired": False}
    made = [about | {"profiling_name": "gloo:all_reduce", "collective_seq_id": 7}]
    made += [about | {"profiling_name": "nccl:all_reduce", "collective_seq_id": number} for number in range(9)]
    made += [about | {"profiling_name": "gloo:recv 0<-3", "p2p_seq_id": 5, "is_p2p": True}]  # of a sum in pairs
    monkeypatch.setattr(torch_internals, "recorded_collectives", lambda: made)
    told = flight_recorder.describe({0: flight_recorder.of_this_rank()})
    assert "gloo:all_reduce 7 [1] Double NOT DONE" in told
    assert "recv" not in told
    assert told.count("nccl:all_reduce") == 3
