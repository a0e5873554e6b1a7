"""The agent that starts the ranks of this machine."""

from types import SimpleNamespace

import pytest

from lockstep.distributed import agent, warm_process


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
