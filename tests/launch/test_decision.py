"""What launchers decide after ranks have ended, on one node and on several."""

import json
import signal

import pytest
import torch

from lockstep.core import errors
from lockstep.core.errors import Preempted
from lockstep.core.parallel import launched
from lockstep.launch.decision import Action, Ending, RankFailure, StartHistory, decide

NEW = StartHistory()


def killed(rank=0, node=""):
    return RankFailure(rank, -signal.SIGKILL, 0, {}, node)


def told(rank, text, *, code=1, node="", **report):
    return RankFailure(rank, code, 1, {"text": text, "retryable": True, **report}, node)


def saved(rank, node=""):
    return RankFailure(rank, Preempted.exit_code, 1, {"text": "stopped at step 7, saved", "stopped": True}, node)


def ended_by_its_launcher(rank, node):
    return RankFailure(rank, -signal.SIGKILL, 1, {"stopped": True}, node)


def test_all_ranks_that_end_well_are_done_even_where_a_request_came_too_late():
    assert decide(Ending(()), NEW, 3).action is Action.DONE
    assert decide(Ending((), asked=True), NEW, 3).action is Action.DONE


def test_a_segmentation_fault_under_torchs_debug_variable_names_the_variable(monkeypatch):
    fault = RankFailure(1, -signal.SIGSEGV, 1, {"last_lines": ["Fatal Python error: Segmentation fault"]})
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    assert decide(Ending((fault,)), NEW, 3).action is Action.RESTART
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    decision = decide(Ending((fault,)), NEW, 3)
    assert decision.action is Action.FAIL
    assert "unset TORCH_DISTRIBUTED_DEBUG: with DETAIL" in str(decision.error)


def test_the_cause_names_rank_and_node():
    lost = told(0, "lost the connection", node="a", lost_another=True)
    decision = decide(Ending((lost, killed(1, "b")), step=7), NEW, 3)
    assert decision.action is Action.RESTART
    assert decision.text == ("rank 1 on node b was killed by signal 9 (SIGKILL)\nfailed at step 7: restart 1 of 3")
    assert decision.history == StartHistory(restarts=1, crashed_at=7, in_a_row=1)
    follows = told(0, "because of it", node="a", origin=[1, "a wrong value"])
    decision = decide(Ending((follows, told(1, "a wrong value", node="b", code=2, retryable=False))), NEW, 3)
    assert decision.action is Action.FAIL
    assert str(decision.error) == "rank 1 on node b failed: a wrong value"
    assert decision.error.exit_code == 2


def test_the_node_of_a_cause_that_only_another_rank_tells():
    follows = told(0, "because of it", node="a", origin=[1, "a wrong value"], retryable=False)
    decision = decide(Ending((follows, ended_by_its_launcher(1, "b"))), NEW, 3)
    assert str(decision.error) == "rank 1 on node b failed: a wrong value"


def test_ranks_that_their_launcher_ended_are_neither_a_cause_nor_a_kill_from_outside():
    failures = (told(0, "ValueError", node="a"), ended_by_its_launcher(1, "b"))
    first = decide(Ending(failures, step=7), NEW, 9)
    assert first.text.startswith("rank 0 on node a failed: ValueError")
    second = decide(Ending(failures, step=7), first.history, 9)
    assert second.action is Action.FAIL  # the second time, and not the fifth
    assert "failed 2 times in a row at step 7" in str(second.error)


def test_an_exception_before_the_first_step_of_a_new_run_is_not_tried_again():
    bad = (told(1, "KeyError: 'labels'", from_outside=False),)
    for step in (-1, 0):
        decision = decide(Ending(bad, step=step), NEW, 3)
        assert decision.action is Action.FAIL
        assert "KeyError" in str(decision.error)
    assert decide(Ending(bad, step=1), NEW, 3).action is Action.RESTART
    went_on = StartHistory(restarts=1, crashed_at=7, in_a_row=1)  # a start before this one has made steps
    assert decide(Ending(bad, step=-1), went_on, 3).action is Action.RESTART
    for outside in (
        told(1, "the GPU has an error", from_outside=True),
        told(1, "out of memory", from_outside=False, retries_differently=True),
        killed(1),
    ):
        assert decide(Ending((outside,), step=-1), NEW, 3).action is Action.RESTART
    assert decide(Ending(bad, step=-1, lost=("b",)), NEW, 3).action is Action.RESTART


@pytest.mark.parametrize(
    ("error", "from_outside"),
    [
        (KeyError("labels"), False),
        (errors.DataError("no such file"), False),
        (errors.DeviceError("ECC"), True),
        (errors.RankError("lost the connection"), True),
        (ConnectionResetError(), True),
        (torch.distributed.DistNetworkError("the address is in use"), True),
    ],
)
def test_a_rank_reports_whether_its_error_came_from_outside(tmp_path, monkeypatch, error, from_outside):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    launched.report_failure(error, "text")
    report = json.loads((tmp_path / "error").read_text())["message"]["extraInfo"]
    assert report["from_outside"] is from_outside


def test_five_kills_in_a_row_at_one_step_end_the_run_and_another_step_begins_anew():
    history, steps = NEW, [7, 7, 8, 8, 8, 8, 8]
    for number, step in enumerate(steps):
        decision = decide(Ending((killed(),), step=step), history, 99)
        assert (decision.action is Action.FAIL) == (number == len(steps) - 1)
        history = decision.history


def test_smaller_micro_batches_are_another_try():
    shortage = told(1, "out of memory", node="b", retries_differently=True)
    history = StartHistory(restarts=1, crashed_at=7, in_a_row=1)
    assert decide(Ending((shortage,), step=7), history, 9).action is Action.RESTART


def test_restarts_are_counted_and_lost_nodes_are_not():
    spent = StartHistory(restarts=3, crashed_at=5, in_a_row=1)
    assert decide(Ending((killed(),), step=7), spent, 3).action is Action.FAIL
    lost = Ending((told(0, "lost the connection", node="a", lost_another=True),), step=7, lost=("b",))
    decision = decide(lost, spent, 3)
    assert decision.action is Action.RESTART
    assert decision.text == "node b sent no heartbeat\nall ranks stopped at step 7, and restart"
    assert decision.history.restarts == 3


def test_nodes_that_are_lost_at_the_same_step_again_and_again_end_the_run():
    history = NEW
    for number in range(5):
        decision = decide(Ending((), step=7, lost=("b",)), history, 3)
        history = decision.history
        assert (decision.action is Action.FAIL) == (number == 4)
    assert "failed 5 times in a row at step 7" in str(decision.error)


def test_an_error_that_would_come_again_ends_the_run_although_a_node_was_lost_too():
    wrong = told(0, "a wrong key", code=2, node="a", retryable=False)
    decision = decide(Ending((wrong,), lost=("b",)), NEW, 3)
    assert decision.action is Action.FAIL
    assert decision.error.exit_code == 2


def test_a_request_stops_all_nodes():
    decision = decide(Ending((saved(0, "a"), saved(1, "b")), step=7, asked=True), NEW, 3)
    assert decision.action is Action.STOP
    assert decision.text == "stopped at step 7, saved"
    assert decide(Ending((saved(0, "a"),), step=7), NEW, 3).action is Action.STOP  # a signal to a rank itself
    deaf = RankFailure(0, -signal.SIGUSR1, 0, {}, "a")
    assert decide(Ending((deaf,), asked=True), NEW, 3).action is Action.STOP
    other = RankFailure(1, 1, 0, {}, "a")  # ended by SIGTERM, because rank 0 was dead
    assert decide(Ending((deaf, other), asked=True), NEW, 3).action is Action.STOP
    assert decide(Ending((deaf, other)), NEW, 3).action is not Action.STOP


def test_a_node_that_is_lost_while_the_run_is_to_stop_does_not_start_it_again():
    decision = decide(Ending((told(0, "lost", node="a", lost_another=True),), asked=True, lost=("b",)), NEW, 3)
    assert decision.action is Action.STOP
    assert "node b sent no heartbeat while the run was stopping" in decision.text


def test_a_node_that_joins_costs_no_restart_and_a_request_to_stop_comes_first():
    both = (saved(0, "a"), saved(1, "b"))
    decision = decide(Ending(both, step=7, joining=True), StartHistory(restarts=3), 3)
    assert decision.action is Action.RESTART
    assert decision.history == StartHistory(restarts=3)
    assert decide(Ending(both, step=7, joining=True, asked=True), NEW, 3).action is Action.STOP


def test_a_failure_while_a_node_joins_is_a_failure():
    decision = decide(Ending((saved(0, "a"), killed(1, "b")), step=7, joining=True), NEW, 3)
    assert decision.text.startswith("rank 1 on node b was killed by signal 9")
    assert decision.history.restarts == 1


def test_a_warm_process_that_was_killed_is_the_cause():
    gone = "on node b, the process from which ranks are forked was killed by signal 9"
    decision = decide(Ending((RankFailure(1, 255, 0, {}, "b"),), step=7, warm_process=gone), NEW, 3)
    assert decision.text.startswith(gone)


@pytest.mark.parametrize("lost", [(), ("b", "c")])
def test_an_ending_travels_as_json(lost):
    ending = Ending((killed(), told(1, "x", node="b")), step=3, asked=True, joining=True, lost=lost, warm_process="w")
    assert Ending.of(json.loads(json.dumps(ending.as_dict()))) == ending


def found(rank, node, guilty=(1,)):
    return told(rank, "the device of rank 1", code=3, node=node, retryable=False, guilty=list(guilty))


def test_the_node_of_a_guilty_rank_is_left_out_where_enough_are_left():
    failures = (found(0, "a"), found(1, "b"), found(2, "c"))
    decision = decide(Ending(failures, step=7, nodes=("a", "b", "c"), least=2), NEW, 0)
    assert (decision.action, decision.left_out) == (Action.RESTART, ("b",))
    assert decision.history == NEW  # it is no restart after a crash
    assert decision.text.endswith("node b will no longer take part: the others continue")
    for ending in (
        Ending(failures, step=7, nodes=("a", "b", "c"), least=3),
        Ending(failures, step=7),  # one machine
        Ending(tuple(found(rank, node, ()) for rank, node in enumerate("abc")), nodes=("a", "b", "c"), least=1),
    ):
        decision = decide(ending, NEW, 3)
        assert decision.action is Action.FAIL
        assert decision.error.exit_code == 3
    assert decide(Ending(failures, nodes=("a", "b", "c"), asked=True), NEW, 3).action is Action.FAIL


def test_an_ending_with_nodes_travels_as_json():
    ending = Ending((found(1, "b"),), nodes=("a", "b"), least=1)
    assert Ending.of(json.loads(json.dumps(ending.as_dict()))).nodes == ("a", "b")
