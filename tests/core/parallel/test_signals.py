"""Being asked to stop: what a signal does here, and how ranks agree on it."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from lockstep.core.errors import Preempted
from lockstep.core.parallel import heartbeat, launched, signals, stop_consensus
from lockstep.core.parallel.heartbeat import Heartbeat
from lockstep.core.parallel.signals import ASKING, StopFlag, listening
from lockstep.core.parallel.stop_consensus import StopConsensus
from lockstep.launch import launcher
from tests.processes import HANG_S

ONCE_S, KEY_S = signals._ONCE_S, signals._KEY_S


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    heartbeat.own()  # in memory, whatever a test sets
    for name in (launched.FOLDER, launched.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name in ("_ONCE_S", "_KEY_S"):
        monkeypatch.setattr(signals, name, 1000.0)  # a second request would end the process that runs these tests


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-signals"]


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python runs the handler between two instructions


# ---- in this process


@pytest.mark.parametrize("number", ASKING)
def test_before_there_is_anything_to_save_a_signal_stops_at_once(number):
    with (
        pytest.raises(Preempted, match=f"stopped by {number.name} before training began; nothing was lost") as caught,
        listening(),
    ):
        send(number)
    assert caught.value.exit_code == 75
    assert not isinstance(caught.value, Exception)


@pytest.mark.parametrize("number", ASKING)
def test_later_it_sets_a_flag(number):
    with listening() as flag:
        flag.saves = True
        assert flag.signal is None
        send(number)
        assert flag.signal is number
        assert flag.name == number.name
        send(signal.SIGTERM)  # at once: the same request on another way
        assert flag.signal is number


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with listening() as flag:
            send(signal.SIGHUP)
            assert flag.signal is None
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_those_of_before_when_it_ends():
    def mine(number, frame):
        pass

    old = signal.signal(signal.SIGUSR1, mine)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    pipe = signal.set_wakeup_fd(writing)
    try:
        before = {number: signal.getsignal(number) for number in ASKING}
        with listening():
            assert not any(signal.getsignal(number) is before[number] for number in ASKING)
        assert {number: signal.getsignal(number) for number in ASKING} == before
        with contextlib.suppress(KeyError), listening():
            raise KeyError
        assert {number: signal.getsignal(number) for number in ASKING} == before
        assert signals.current() is not signals.current()
    finally:
        assert signal.set_wakeup_fd(pipe) == writing
        signal.signal(signal.SIGUSR1, old)
        os.close(reading)
        os.close(writing)


def test_nothing_is_left_when_it_ends():
    for thread in threads():  # of tests before
        thread.join(HANG_S)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with listening():
            assert len(threads()) == 1
        for thread in threads():
            thread.join(HANG_S)
    assert threads() == []
    assert len(os.listdir("/proc/self/fd")) == opened


def test_inside_another_it_adds_nothing():
    with listening() as outer:
        handlers = [signal.getsignal(number) for number in ASKING]
        with listening() as inner:
            assert inner is outer is signals.current()
            assert len(threads()) == 1
        assert [signal.getsignal(number) for number in ASKING] == handlers
        outer.saves = True
        send(signal.SIGUSR1)
        assert outer.signal is signal.SIGUSR1


def test_outside_the_main_thread_it_adds_nothing():
    seen = []

    def run():
        with listening() as flag:
            seen.append((flag.signal, signal.getsignal(signal.SIGUSR1)))

    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_other_signals_that_python_handles_are_no_request():
    handled = []
    old = signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    try:
        with listening() as flag:
            flag.saves = True
            for _ in range(3):
                send(signal.SIGUSR2)
            send(signal.SIGUSR1)  # the thread reads signals in their order, so it has seen the others too
            assert flag.signal is signal.SIGUSR1
        assert handled == [signal.SIGUSR2] * 3
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_rank_that_starts_after_its_launcher_was_asked_stops(monkeypatch, tmp_path):
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    with listening():
        pass
    (tmp_path / "stop").write_text("SIGINT")
    before = [signal.getsignal(number) for number in ASKING]
    with pytest.raises(Preempted, match="stopped by SIGINT before training began"), listening():
        pytest.fail("went on")
    assert [signal.getsignal(number) for number in ASKING] == before


def test_the_signal_is_named_as_the_user_sent_it(monkeypatch, tmp_path):
    flag = StopFlag()
    assert flag.name == "a signal to another rank"
    flag.note(signal.SIGUSR1)
    assert flag.name == "SIGUSR1"
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    assert flag.name == "SIGUSR1"
    (tmp_path / "stop").write_text("SIGINT")
    assert flag.name == "SIGINT"


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(signals, "_ONCE_S", ONCE_S)
    monkeypatch.setattr(signals, "_KEY_S", KEY_S)
    now = SimpleNamespace(monotonic=lambda: now.value, value=100.0)
    monkeypatch.setattr(signals, "time", now)
    return now


@pytest.mark.parametrize("first", ASKING)
def test_requests_within_a_second_are_one(clock, first):
    flag = StopFlag()
    assert not flag.note(first)
    clock.value = 100.9
    assert not flag.note(signal.SIGTERM)
    assert not flag.note(signal.SIGUSR1)
    clock.value = 101.1
    assert flag.note(signal.SIGTERM)
    assert flag.signal is first


@pytest.mark.parametrize("first", ASKING)
def test_a_key_that_is_pressed_again_is_a_request_of_its_own(clock, first):
    flag = StopFlag()
    flag.note(first)
    clock.value = 100.15  # who presses it twice takes longer; what a wrapper passes on comes sooner
    assert not flag.note(signal.SIGINT)
    clock.value = 100.3
    assert flag.note(signal.SIGINT)


def test_launcher_tells_a_second_key_press_from_the_same_one(clock, monkeypatch):
    handlers = {number: signal.getsignal(number) for number in ASKING}
    ended = []
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(launcher.Forwarding, "_end_at_once", lambda self, number: ended.append((clock.value, number)))
    try:
        stop = launcher.Forwarding()
        with pytest.raises(Preempted):
            stop._handle(signal.SIGINT, None)
        for clock.value in (100.1, 100.15, 100.3):
            stop._handle(signal.SIGINT, None)
        stop._handle(signal.SIGTERM, None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == [(100.3, signal.SIGINT)]


# ---- what a thread does while the main thread computes; in processes, without torch

CHILD = """
import hashlib, os, sys, threading, time
from lockstep.core.parallel import signals
signals._ONCE_S = signals._KEY_S = 1e6
with signals.listening() as flag:
    flag.saves = True
    def report():
        print("torch" in sys.modules, flush=True)
        while flag.signal is None:
            time.sleep(0.01)
        print(flag.signal.name, flush=True)
        sys.stdin.readline()
        signals._ONCE_S = signals._KEY_S = 0.0
        print("what comes now is another request", flush=True)
    threading.Thread(target=report, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # as a collective: Python's handlers wait for its end
"""


@pytest.fixture
def child():
    started = []

    def start(code=CHILD, **environment):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, env=os.environ | environment, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def let_time_pass(process):
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "what comes now is another request\n"


@pytest.mark.cases("2")
@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)])
def test_second_signal_ends_the_process_at_once(child, first, second):
    process = child()
    assert process.stdout.readline() == "False\n"  # listening needs no torch
    process.send_signal(first)
    process.send_signal(first)  # the same request, on another way
    assert process.stdout.readline() == f"{first.name}\n"
    let_time_pass(process)
    assert process.poll() is None
    process.send_signal(second)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + second
    assert errors.strip() == "stopped at once, without saving; the same command resumes from the newest checkpoint"


@pytest.mark.cases("True")
@pytest.mark.parametrize("dead", [False, True])
def test_sigterm_after_a_rank_died_ends_the_others(child, tmp_path, dead):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "rank-1").write_bytes(bytes(Heartbeat(pid=gone.pid if dead else os.getpid())))
    process = child(**{launched.LAUNCHED: "1", launched.FOLDER: str(tmp_path), "RANK": "0"})
    assert process.stdout.readline() == "False\n"
    process.send_signal(signal.SIGTERM)
    if dead:
        assert process.wait(HANG_S) == 1
        return
    assert process.stdout.readline() == "SIGTERM\n"
    let_time_pass(process)
    process.send_signal(signal.SIGTERM)  # whether a second one ends it is the launcher's decision
    time.sleep(0.2)
    assert process.poll() is None


def test_signal_to_a_forked_child_is_none_to_this_process(child):
    process = child(
        """
import multiprocessing, time
from lockstep.core.parallel import signals
with signals.listening() as flag:
    flag.saves = True
    begun = multiprocessing.get_context("fork").Event()
    worker = multiprocessing.get_context("fork").Process(target=lambda: (begun.set(), time.sleep(900)))
    worker.start()
    begun.wait()
    worker.terminate()
    worker.join()
    ended = not worker.is_alive()
    worker.kill()
    print(ended, flag.signal)
"""
    )
    assert process.communicate(timeout=HANG_S)[0] == "True None\n"


# ---- before the command line is imported


EARLY = """
import os, signal, sys
from lockstep import __main__ as command
sys.argv[1:] = {arguments}
class Asking:  # the import system asks it first: what is imported next is interrupted
    def find_spec(self, name, path=None, target=None):
        if name == "lockstep.cli":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Asking())
command.main()
"""


@pytest.mark.cases("None-2")
@pytest.mark.parametrize("number", ASKING)
@pytest.mark.parametrize("rank", [None, "0"])
def test_signal_while_the_command_line_is_imported_is_understood(child, number, rank):
    process = child(EARLY.format(arguments=["train", "toy"], number=int(number)), **({"RANK": rank} if rank else {}))
    out, errors = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (75, "")
    assert errors == (
        ""
        if rank
        else f"stopped by {number.name} before training began; nothing was lost; the same command starts again\n"
    )


def test_key_press_before_another_command_ends_it_without_a_traceback(child):
    process = child(EARLY.format(arguments=["recipes"], number=int(signal.SIGINT)))
    assert process.communicate(timeout=HANG_S) == ("", "")
    assert process.returncode == 130


def test_importing_the_package_sets_no_handler(child):
    process = child(
        "import signal, lockstep.__main__, lockstep.cli; "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert process.communicate(timeout=HANG_S)[0] == "True\n"


# ---- agreement


class Ranks:
    """A world of threads, each with a clock of its own."""

    def __init__(self, size, monkeypatch):
        self.size, self.barrier = size, threading.Barrier(size, timeout=HANG_S)
        self.here = threading.local()
        self.values = [None] * size
        monkeypatch.setattr(stop_consensus, "time", SimpleNamespace(perf_counter=lambda: self.here.clock))

    def all_sum(self, values):
        self.values[self.here.rank] = values
        self.here.talked.append(self.here.call)
        self.barrier.wait()
        summed = [sum(column) for column in zip(*self.values, strict=True)]
        self.barrier.wait()
        return summed

    def run(self, calls, seconds, asked_at=None, restart_at=None):
        """For each rank, the calls with communication, and the calls with the answer yes.

        seconds(rank, call): how long the work before a call takes.
        """
        answers = [None] * self.size

        def work(rank):
            self.here.rank, self.here.clock, self.here.talked = rank, 1000.0 * rank, []
            flag, yes = StopFlag(), []
            agreement = StopConsensus(self, flag)
            for call in range(calls):
                self.here.call = call
                self.here.clock += seconds(rank, call)
                if (rank, call) == asked_at:
                    flag.note(signal.SIGUSR1)
                if call == restart_at:
                    agreement.restart()
                if agreement():
                    yes.append(call)
            answers[rank] = (self.here.talked, yes)

        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(HANG_S)
        assert None not in answers
        return answers


def gaps(talked):
    return [later - earlier for earlier, later in zip([-1, *talked], talked, strict=False)]


def test_ranks_talk_at_the_same_calls_about_once_a_second(monkeypatch):
    answers = Ranks(3, monkeypatch).run(5000, lambda rank, call: 0.001 * (1 + rank))
    talked = answers[0][0]
    assert [answer[0] for answer in answers] == [talked] * 3
    between = gaps(talked)
    assert between[0] == 1
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(between))
    assert 450 <= between[-1] <= 500  # of 2 ms on average
    assert len(talked) < 25


def test_slow_steps_are_asked_every_time(monkeypatch):
    answers = Ranks(2, monkeypatch).run(6, lambda rank, call: 3.0 + rank)
    assert [answer[0] for answer in answers] == [list(range(6))] * 2


def test_steps_that_become_slow_are_asked_more_often(monkeypatch):
    ((talked, _), _) = Ranks(2, monkeypatch).run(2000, lambda rank, call: 0.001 if call < 900 else 0.1)
    assert max(gaps(talked)) > 100
    assert gaps(talked)[-1] == 10


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_hear_of_a_request_to_one_at_the_same_call(monkeypatch, rank):
    ranks = Ranks(2, monkeypatch)
    answers = ranks.run(1000, lambda *_: 0.01, asked_at=(rank, 300))
    talked, yes = answers[0]
    assert answers[1] == (talked, yes)
    assert yes == [call for call in talked if call >= 300]
    assert yes[0] < 300 + 120  # about a second


def test_ranks_agree_on_the_seconds_that_have_passed(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    seen = {0: [], 1: []}
    call = StopConsensus.__call__

    def noting(agreement):
        answer = call(agreement)
        seen[ranks.here.rank].append(agreement.elapsed_s)
        if ranks.here.call == 500:
            agreement.restart()  # an evaluation: the time goes on
        return answer

    monkeypatch.setattr(StopConsensus, "__call__", noting)
    ((talked, _), _) = ranks.run(1000, lambda rank, call: 0.01 * (1 + 2 * rank))
    assert seen[0] == seen[1]
    for number in talked:
        assert seen[0][number] == pytest.approx(0.02 * (number + 1))  # the mean of both ranks
    changes = [number for number in range(1, 1000) if seen[0][number] != seen[0][number - 1]]
    assert {0, *changes} == set(talked)  # and not between


def test_after_a_restart_they_talk_at_the_next_call(monkeypatch):
    ((talked, _), other) = Ranks(2, monkeypatch).run(700, lambda *_: 0.001, restart_at=600)
    assert 600 in talked
    assert 601 in talked or 602 in talked
    assert other[0] == talked


def test_work_of_no_time_is_no_division_by_zero(monkeypatch):
    ((talked, _), _) = Ranks(2, monkeypatch).run(100, lambda *_: 0.0)
    assert gaps(talked)[:6] == [1, 2, 4, 8, 16, 32]


def test_one_rank_talks_to_nobody():
    flag = StopFlag()
    asked = StopConsensus(SimpleNamespace(size=1), flag)
    assert [asked() for _ in range(3)] == [False] * 3
    assert 0 < asked.elapsed_s < asked.elapsed_s
    flag.note(signal.SIGINT)
    assert asked()


def test_second_signal_ends_the_process_although_the_terminal_is_gone(tmp_path):
    code = (
        "import os, signal, time\n"
        "from lockstep.core.parallel import signals\n"
        "signals._ONCE_S = 0.0\n"
        "reading, writing = os.pipe()\n"
        "os.close(reading)\n"
        "os.dup2(writing, 2)\n"  # writing fails, as it does for a terminal that is gone
        "with signals.listening() as flag:\n"
        "    flag.saves = True\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    time.sleep(900)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != launched.LAUNCHED}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=HANG_S)
    assert done.returncode == 128 + signal.SIGHUP


def test_a_request_to_save_after_the_end_does_not_change_the_exit_code():
    """A scheduler sends it before a time limit, whatever the process is doing."""
    code = "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGUSR1); "
    code += "from lockstep.__main__ import main; sys.argv = ['lockstep', 'train', '--help']; main()"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("is_handled", "saves", "ends"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_a_main_thread_that_does_not_come_to_a_signal_is_ended_where_there_is_nothing_to_save(
    is_handled, saves, ends, monkeypatch, capfd
):
    codes = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    with listening() as flag:
        flag.note(signal.SIGTERM)
        flag.is_handled, flag.saves = is_handled, saves
        signals._end_if_stuck(flag)
    assert codes == [75] * ends
    assert ("stopped by SIGTERM before training began; nothing was lost" in capfd.readouterr().err) == ends


def test_a_signal_that_the_main_thread_does_not_handle_starts_a_clock_that_no_exit_waits_for(monkeypatch):
    waits, clock = [], SimpleNamespace(daemon=False, started=threading.Event())
    clock.start = clock.started.set
    monkeypatch.setattr(signals.threading, "Timer", lambda *arguments: waits.append(arguments) or clock)
    with contextlib.suppress(Preempted), listening() as flag:
        send(signal.SIGTERM)
        raise AssertionError
    assert clock.started.wait(HANG_S)
    assert waits == [(signals._STUCK_S, signals._end_if_stuck, (flag,))]
    assert clock.daemon
