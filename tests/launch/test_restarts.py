"""How often the launcher starts its ranks again, with starts that are made up."""

import ctypes
import os
import signal
from types import SimpleNamespace

import pytest

from lockstep.core.errors import Preempted, RankError
from lockstep.core.parallel import heartbeat, launched
from lockstep.launch import agent, launcher


def failed(code, retryable=True, retries_differently=False):
    """What torch's agent says of a rank that ended with `code`, having left words unless it was killed."""
    words = (
        {
            "message": {
                "message": "its words",
                "extraInfo": {"origin": None, "retryable": retryable, "retries_differently": retries_differently},
            }
        }
        if code > 0
        else {}
    )
    failure = SimpleNamespace(
        exitcode=code, error_file_data=words, timestamp=1, signal_name=lambda: signal.Signals(-code).name
    )
    return SimpleNamespace(failures={0: failure})


interrupted = []
"""What each start of a test knows about the start before."""


@pytest.fixture
def starts(monkeypatch):
    """Runs `launcher.launch` over (step, failure) per start; gives how often it started, and what it raised."""

    def run(outcomes, max_restarts):
        steps = []
        interrupted.clear()

        def once(main, arguments, *, nproc, folder, start):
            step, failure = outcomes[min(len(steps), len(outcomes) - 1)]
            interrupted.append(os.environ.get(launched.INTERRUPTED))
            steps.append(step)
            one = heartbeat.Heartbeat(pid=0, step=step)
            (folder / "rank-0").write_bytes(ctypes.string_at(ctypes.addressof(one), ctypes.sizeof(one)))
            return failure.failures if failure else {}

        monkeypatch.setattr(agent, "run_ranks", once)
        error = None
        try:
            launcher.launch(["nothing"], 2, max_restarts, main=print)
        except (RankError, Preempted) as raised:
            error = raised
        return len(steps), error

    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = {number: signal.getsignal(number) for number in launcher.ASKING}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_crash_at_one_step_ends_it_the_second_time_and_a_kill_the_fifth(starts):
    count, error = starts([(7, failed(1))], 10)
    assert count == 2
    assert "failed 2 times in a row at step 7" in str(error)
    count, error = starts([(-1, failed(-signal.SIGKILL))], 10)
    assert count == 5
    assert "failed 5 times in a row before training began" in str(error)


def test_crash_at_one_step_is_not_the_same_where_the_next_start_does_it_in_another_way(starts):
    count, error = starts([(7, failed(1, retries_differently=True))] * 4 + [(7, failed(1))], 10)
    assert count == 6
    assert "failed 2 times in a row at step 7" in str(error)


def test_rank_that_the_agent_stopped_is_not_the_cause(starts):
    def words(text, **more):
        return {"message": {"message": text, "extraInfo": {"origin": None, "retryable": False, **more}}}

    stopped = SimpleNamespace(exitcode=143, error_file_data=words("stopped by SIGTERM", stopped=True), timestamp=1)
    wrong = SimpleNamespace(exitcode=2, error_file_data=words("a wrong key"), timestamp=2)
    count, error = starts([(-1, SimpleNamespace(failures={0: stopped, 1: wrong}))], 3)
    assert count == 1
    assert "rank 1 failed: a wrong key" in str(error)
    assert error.exit_code == 2
    knows = SimpleNamespace(
        exitcode=1, error_file_data=words("rank 1 stopped because of it", origin=[0, "a wrong key"]), timestamp=2
    )
    _, error = starts([(-1, SimpleNamespace(failures={0: stopped, 1: knows}))], 3)
    assert "rank 0 failed: a wrong key" in str(error)


def test_rank_killed_while_another_one_starts_is_a_crash_and_no_preemption(starts):
    """The agent stops the other rank with SIGTERM, and a rank that has not begun then ends with the code for that."""

    def both(first, second):
        return SimpleNamespace(failures={0: first.failures[0], 1: second.failures[0]})

    killed, stopped = failed(-signal.SIGKILL), failed(Preempted.exit_code, retryable=False)
    assert starts([(-1, both(killed, stopped)), (-1, both(stopped, killed)), (9, None)], 3) == (3, None)
    follows = failed(1)
    follows.failures[0].error_file_data["message"]["extraInfo"]["origin"] = [0, "stopped by SIGTERM"]
    count, error = starts([(-1, both(stopped, follows))], 3)
    assert count == 1
    assert isinstance(error, Preempted)


def test_budget_is_for_the_whole_run(starts):
    count, error = starts([(step, failed(1)) for step in range(9)], 3)
    assert count == 4
    assert "its words" in str(error)


def test_run_that_comes_through_returns(starts):
    assert starts([(3, failed(-signal.SIGKILL)), (3, failed(-signal.SIGKILL)), (9, None)], 3) == (3, None)


def test_error_that_would_come_again_and_a_request_to_stop_are_not_tried_again(starts):
    assert starts([(3, failed(1, retryable=False))], 3)[0] == 1
    count, error = starts([(3, failed(75))], 3)
    assert count == 1
    assert isinstance(error, Preempted)


def test_ranks_know_whether_the_start_before_was_interrupted_or_short_of_memory(starts):
    killed, short = failed(-signal.SIGKILL), failed(1, retries_differently=True)
    assert starts([(3, killed), (4, short), (4, short), (6, killed), (9, None)], 3) == (5, None)
    assert interrupted == [None, "1", "0", "0", "1"]
