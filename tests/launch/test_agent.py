"""The agent that starts the ranks of this machine."""

from types import SimpleNamespace

import pytest

from lockstep.core.errors import RankError
from lockstep.core.parallel import launched
from lockstep.launch import agent, decision, launcher, start, warm_process
from tests.launch import abort_cases
from tests.processes import is_running


def agent_of(exit_codes):
    made = agent.RankAgent.__new__(agent.RankAgent)
    made.processes = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(exit_codes)}
    return made


def test_unknown_exit_codes_mean_that_the_warm_process_ends_even_if_it_has_not_ended_yet(monkeypatch):
    answers = iter([None, None, "it was killed"])
    monkeypatch.setattr(warm_process, "how_it_ended", lambda: next(answers))
    assert agent_of([None, 255])._warm_process_is_gone()


@pytest.mark.parametrize("codes", [[1, None], [-9, None], [0, 75]])
def test_known_exit_codes_are_reported_at_once(monkeypatch, codes):
    answers = iter([None])
    monkeypatch.setattr(warm_process, "how_it_ended", lambda: next(answers))
    assert not agent_of(codes)._warm_process_is_gone()


def test_a_rank_may_end_with_exit_code_255_itself(monkeypatch):
    monkeypatch.setattr(agent, "_ENDS_S", 0.02)
    monkeypatch.setattr(warm_process, "how_it_ended", lambda: None)
    assert not agent_of([255])._warm_process_is_gone()


def test_exit_code_0_before_the_end_of_the_main_function_is_a_failure_that_names_the_rank(tmp_path, monkeypatch):
    monkeypatch.setenv(launched.FOLDER, str(tmp_path))
    arguments = (str(tmp_path),)
    begun = start.on_one_node(3)
    ended = agent.run_ranks(abort_cases.end_early_on_rank_1, arguments, nproc=3, folder=tmp_path, start=begun)
    failures = launcher.rank_failures(ended)
    assert [failure.rank for failure in failures if failure.exit_code == 0] == [1]
    first = decision.decide(decision.Ending(failures, step=7), decision.StartHistory(), 3)
    assert first.text.startswith("rank 1 failed: it ended with exit code 0 before the command ended")
    second = decision.decide(decision.Ending(failures, step=7), first.history, 3)
    assert isinstance(second.error, RankError)  # it is not started again for ever
    assert second.error.exit_code == 1
    new = decision.decide(decision.Ending(failures), decision.StartHistory(), 3)
    assert new.action is decision.Action.FAIL


def test_a_process_that_a_killed_rank_has_left_behind_is_gone_before_the_next_start(tmp_path):
    """It would hold the memory of the rank's device."""
    arguments = (str(tmp_path),)
    begun = start.on_one_node(2)
    ended = agent.run_ranks(
        abort_cases.leave_a_process_behind_on_rank_1, arguments, nproc=2, folder=tmp_path, start=begun
    )
    assert ended[1].exitcode == -9
    assert not is_running(int((tmp_path / "left").read_text()))
