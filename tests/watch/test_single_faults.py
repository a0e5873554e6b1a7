"""One flipped bit has the right verdict at every moment of a step; and what a run says about its checks is true."""

import json
import types

import pytest
import torch

from lockstep.watch import evidence
from lockstep.watch.resting import Resting
from tests.ranks import run_ranks
from tests.selection import mainly
from tests.watch import cases, strikes

ALL = {
    f"{strategy} {world}, {kind}, {moment} {step}": (strategy, world, kind, moment, step)
    for strategy, world in strikes.STRATEGIES
    for kind, moment, step in strikes.cases()
}
ALL |= {  # every step from one check to the next
    f"ddp {world}, weight, {moment} {step}": ("ddp", world, "weight", moment, step)
    for world in (2, 3)
    for moment in ("before the step", "before the backward")
    for step in range(6, 12)
}
KEPT = [
    "ddp 2, weight, before the step 10",
    "ddp 2, weight, before the backward 10",
    "ddp 2, reduced, before the update 10",
    "ddp 3, weight, before the forward 10",
    "fsdp 2, weight, before the forward 10",
    "fsdp 2, reduced, before the update 10",
    "single 1, reduced, late 10",
]


@pytest.mark.parametrize("name", mainly(KEPT, list(ALL)))
def test_a_bit_that_flips_once_has_the_right_verdict_at_each_moment(tmp_path, name):
    strategy, world, kind, moment, step = ALL[name]
    rank, right = min(1, world - 1), strikes.right_verdict(strategy, kind, moment, step)
    strike = {"kind": kind, "moment": moment, "step": step, "rank": rank}
    answers = run_ranks(world, strikes.struck, strike, strikes.settings_for(strategy, world), tmp_path)
    assert answers[rank]["struck"]
    assert "the watch does not check" not in (tmp_path / "train.log").read_text()
    verdict = cases.verdict_of(tmp_path)
    if right is None:
        assert verdict is None
    else:
        assert (verdict["kind"], verdict["ranks"]) == (right, [rank])
        assert strategy == "ddp" or verdict["step"] == step


@pytest.mark.parametrize("bit", [0, 30, 62])
def test_a_reduced_gradient_is_found_whichever_bit_flips(tmp_path, bit):
    """Also below what rounding of an exchange would explain."""
    strike = {"kind": "reduced", "moment": "before the update", "step": 10, "bit": bit, "rank": 0}
    run_ranks(1, strikes.struck, strike, strikes.settings_for("single", 1), tmp_path)
    verdict = cases.verdict_of(tmp_path)
    assert (verdict["kind"], verdict["tensor"]) == ("memory", "0.weight")


def test_what_rests_must_not_change_unless_torch_writes_it():
    resting, device = Resting(), torch.device("cpu")
    one, other = torch.zeros(40_000), torch.zeros(3, dtype=torch.float64)
    tensors = {("a", "weight"): one, ("b", "weight"): other}

    def changed():
        resting.look(tensors)
        return resting.changed(device)

    resting.keep(tensors)
    assert changed() == []
    one.data[39_999] = 1e-30  # torch counts no write through `.data`
    assert changed() == [("a", "weight")]
    resting.keep(tensors)
    one.add_(1)
    other.data[1] = 1
    assert changed() == [("b", "weight")]
    resting.look(tensors | {("a", "weight"): one.clone()})
    assert ("a", "weight") not in resting.changed(device), "a different tensor in its place was put there by code"


@pytest.mark.parametrize(
    ("checked", "passed", "says"),
    [
        (None, [], "No earlier check had passed"),
        (None, [5, 10], "No earlier check counts: the fault may be older"),
        (49, [], "The last check that counts is of an earlier start: it saw the state after step 49"),
        (
            49,
            [30, 50],
            "The last check that counts is that of step 50. No check looked at the gradients of steps 31 to 49",
        ),
        (
            50,
            [30, 50],
            "The last check that counts is that of step 50. No check looked at the gradients of steps 31 to 49",
        ),
        (
            29,
            [30, 50],
            "The last check that counts is that of step 30. No check looked at the gradients of steps 21 to 29",
        ),
        (21, [22], "The last check that counts is that of step 22. No check looked at the gradients of step 21"),
        (22, [22, 23], "The last check that counts is that of step 23"),
    ],
)
def test_an_error_says_what_checks_have_compared_and_no_more(checked, passed, says):
    run = types.SimpleNamespace(checked_step=checked, first_step=20)
    assert evidence.so_far(run, passed, 60) == says
    if "of step 23" in says:
        assert evidence.so_far(run, passed, 23) == says.replace("that of step 23", "of the state before this step")


def test_faults_between_checks_are_not_said_to_be_seen(tmp_path):
    """A gradient is wrong in step 7, which no check sees: the error after the next fault does not vouch for it."""
    strike = {"kind": "gradient", "moment": "in the pass", "step": [7, 15], "rank": 1}
    answers = run_ranks(2, strikes.struck, strike, strikes.settings_for("ddp", 2), tmp_path)
    for one in answers:
        assert "step 15, watch.every=5: device: the device of rank 1" in one["error"]
        assert "that of step 10. No check looked at the gradients of steps 6 to 9. Nothing is saved" in one["error"]


def test_a_watched_run_says_how_much_was_checked(tmp_path):
    settings = cases.settings(2, "ddp", log={"every_steps": 4})
    assert run_ranks(2, cases.end_of, None, settings, tmp_path) == [None, None]
    told = "watch: 4 checks, all ranks agreed; a micro-batch per rank was recomputed in 4 of 12 steps"
    assert (tmp_path / "train.log").read_text().count(told) == 1
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["watch/checks"] for one in logged if "train/loss" in one] == [1, 2, 4]
    more = settings | {"train": {"steps": 18}}
    assert run_ranks(2, cases.end_of, None, more, tmp_path) == [None, None]
    assert "watch: 6 checks, all ranks agreed; " in (tmp_path / "train.log").read_text()
