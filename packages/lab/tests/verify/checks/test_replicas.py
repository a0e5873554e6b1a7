"""Checks of whether ranks train the same model, on recordings that a test makes up."""

import math

import pytest

from lockstep_lab.verify import compare
from lockstep_lab.verify.checks import on_mesh, replicas
from lockstep_lab.verify.checks.replicas import _differing, _incomplete
from lockstep_lab.verify.compare import TrainingDifference
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.task_probe import TaskProbe
from lockstep_lab.verify.worker_functions import Answer
from packages.lab.tests.verify.made_up import experiments, recording

# ---- probe


def probed(*losses, nproc=2):
    """`losses`: of each rank, by head, after step 6; after step 1 all are alike."""
    probes = {
        6: [{head: value.hex() for head, value in one.items()} for one in losses],
        1: [{"loss": "0x1.0p+0"}] * len(losses),
    }
    return replicas.probe(experiments({"undisturbed": [recording([1.0], probes=probes)] * nproc}, nproc=nproc))


def test_the_same_losses_of_one_batch_pass():
    result = probed({"a": 1.5, "b": 2.0}, {"a": 1.5, "b": 2.0})
    assert result.status == "passed"
    assert result.reason == "one batch has the same loss on 2 ranks after steps 1, 6"


def test_the_last_bit_of_one_head_on_one_rank_is_a_fault():
    other = math.nextafter(2.0, 3.0)
    result = probed({"a": 1.5, "b": 2.0}, {"a": 1.5, "b": 2.0}, {"a": 1.5, "b": other}, nproc=3)
    assert result.status == "fault"
    assert (
        "after step 6 rank 2 differs from ranks 0 and 1 in the b of one batch: 2 and 2.0000000000000004"
        in result.reason
    )
    assert [row["b"] for row in result.rows if row["step"] == 6] == ["2", "2", "2.0000000000000004"]
    assert result.value == other - 2.0


def test_one_rank_has_none_to_be_compared_with():
    for check in (replicas.probe, replicas.replicas, replicas.ranks, on_mesh.strategies):
        assert check(experiments(nproc=1)).status == "not shown"


# ---- replicas


def held(*tables, shapes=None, **more):
    """What each rank holds after step 1: by name (first row, rows, digest)."""
    shapes = shapes or {"model.a": (6, 2), "model.b": (3,), "optimizer.a.step": ()}
    return [recording([1.0], digests={1: table}, shapes=shapes, **more) for table in tables]


WHOLE = {"model.a": (0, 6, (0, 11)), "model.b": (0, 3, (0, 12)), "optimizer.a.step": (0, 1, (0, 13))}
UPPER = {"model.a": (0, 3, (0, 21)), "model.b": (0, 2, (0, 22)), "optimizer.a.step": (0, 1, (0, 13))}
LOWER = {"model.a": (3, 3, (0, 31)), "model.b": (2, 1, (0, 32)), "optimizer.a.step": (0, 1, (0, 13))}
NOTHING_OF_B = {"model.a": (3, 3, (0, 31)), "model.b": (3, 0, (0, 0)), "optimizer.a.step": (0, 1, (0, 13))}


def replicated(*tables, **more):
    return replicas.replicas(experiments({"undisturbed": held(*tables, **more)}))


def test_replicas_that_are_the_same_pass():
    assert _differing(held(WHOLE, WHOLE), 1) == []
    assert _incomplete(held(WHOLE, WHOLE), 1) is None
    result = replicated(WHOLE, WHOLE)
    assert result.status == "passed"
    assert result.reason == "3 tensors are the same on all ranks after each of 1 steps"


def test_shards_that_make_a_whole_pass():
    assert (
        replicated(UPPER, LOWER, sharded=True).reason
        == "3 tensors are one whole copy between the ranks after each of 1 steps"
    )


def test_a_rank_may_hold_no_row():
    whole_of_b = UPPER | {"model.b": (0, 3, (0, 22))}
    assert _incomplete(held(whole_of_b, NOTHING_OF_B), 1) is None
    assert _differing(held(whole_of_b, NOTHING_OF_B), 1) == []


def test_replicas_of_shards_are_compared_with_each_other():
    four = held(UPPER, LOWER, UPPER, LOWER)
    assert _differing(four, 1) == []
    assert _incomplete(four, 1) is None
    other = held(UPPER, LOWER, UPPER, LOWER | {"model.b": (2, 1, (0, 99))})
    assert _differing(other, 1) == [("model.b", (1, 3), "ranks 1 and 3 differ")]


def test_a_tensor_that_differs_is_named_with_its_ranks():
    assert _differing(held(WHOLE, WHOLE | {"model.b": (0, 3, (0, 99))}), 1) == [
        ("model.b", (0, 1), "ranks 0 and 1 differ")
    ]
    assert _differing(held(WHOLE, WHOLE, WHOLE | {"model.b": (0, 3, (0, 99)), "model.a": (0, 6, (0, 98))}), 1) == [
        ("model.a", (0, 2), "rank 2 differs from ranks 0 and 1"),
        ("model.b", (0, 2), "rank 2 differs from ranks 0 and 1"),
    ]
    result = replicated(WHOLE, WHOLE | {"model.b": (0, 3, (0, 99)), "model.a": (0, 6, (0, 98))})
    assert result.status == "fault"
    assert (result.reason, result.value) == (
        "since step 1 ranks 0 and 1 differ in model.a, and 1 other tensor",
        2.0,
    )
    digests = [(row["tensor"], row["rank"], row["digest"][-2:]) for row in result.rows]
    assert digests[:2] == [("model.a", 0, "0b"), ("model.a", 1, "62")]


def test_a_counter_that_differs_between_shards_is_found():
    assert _differing(held(UPPER, LOWER | {"optimizer.a.step": (0, 1, (0, 14))}), 1) == [
        ("optimizer.a.step", (0, 1), "ranks 0 and 1 differ")
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (UPPER, LOWER | {"model.a": (4, 2, (0, 31))}),
        (UPPER | {"model.a": (1, 2, (0, 1))}, LOWER),
        (UPPER, LOWER | {"model.a": (3, 2, (0, 31))}),
        (UPPER, UPPER),
    ],
    ids=["between", "first", "last", "half"],
)
def test_a_missing_row_is_found(one, other):
    assert _incomplete(held(one, other), 1) == "model.a"
    result = replicated(one, other)
    assert result.status == "fault"
    assert "no whole copy of model.a" in result.reason


def test_a_tensor_that_a_rank_knows_nothing_of_is_found():
    without = {name: rows for name, rows in WHOLE.items() if name != "model.b"}
    assert _incomplete(held(WHOLE, without), 1) == "model.b"
    first, other = held(without, WHOLE)
    first.shapes = {"model.a": (6, 2), "optimizer.a.step": ()}
    assert _incomplete([first, other], 1) == "model.b"


def test_state_that_appears_later_is_not_missing_before():
    """Such as an optimizer's, of what is frozen at first."""
    ranks = held(WHOLE, WHOLE)
    for one in ranks:
        one.digests[2] = WHOLE | {"optimizer.b.step": (0, 1, (0, 5))}
        one.shapes = one.shapes | {"optimizer.b.step": ()}
    assert replicas.replicas(experiments({"undisturbed": ranks})).status == "passed"


def test_the_first_step_that_differs_is_named():
    ranks = held(WHOLE, WHOLE)
    for number, one in enumerate(ranks):
        one.digests |= {
            2: WHOLE,
            3: WHOLE | {"model.b": (0, 3, (0, 50 + number))},
            4: WHOLE | {"model.a": (0, 6, (0, 50 + number))},
        }
    assert (
        "since step 3 ranks 0 and 1 differ in model.b" in replicas.replicas(experiments({"undisturbed": ranks})).reason
    )


# ---- the same model

LOSSES = [4.0, 3.0, 2.0, 1.0]


def compared(
    monkeypatch, weights=0.0, curve=LOSSES, limit=1e-9, missing=(), probe=None, check=replicas.ranks, **answers
):
    monkeypatch.setattr(ExperimentRunner, "rounding_bound", lambda self: limit)
    monkeypatch.setattr(
        ExperimentRunner,
        "difference_from_one_process",
        lambda self, name, mine: TrainingDifference(
            weights, "0.weight", compare.curve_difference(LOSSES, mine[0].losses), missing
        ),
    )
    given = {
        "one-process": recording(LOSSES),
        "2-ranks": [recording(curve), recording(curve)],
        "accumulated": [recording(curve)] * 2,
        "fsdp": [recording(curve)] * 2,
        "undisturbed": [recording(LOSSES)] * 2,
        "again": [recording(LOSSES)] * 2,
    }
    return check(experiments(given | {"task-probe": probe or TaskProbe(epsilon=1e-16)} | answers, steps=4))


def test_the_same_model_passes(monkeypatch):
    for check in (replicas.ranks, replicas.accumulation, on_mesh.strategies):
        result = compared(monkeypatch, weights=1e-10, check=check)
        assert (result.status, result.value, result.bound) == ("passed", 1e-10, 1e-9)
        assert result.curves["one process"] == LOSSES


def test_other_weights_and_other_losses_are_a_fault(monkeypatch):
    assert compared(monkeypatch, weights=1e-8).status == "fault"
    result = compared(monkeypatch, curve=[4.0, 3.0, 2.1, 1.0])
    assert result.status == "fault"
    assert "since step 3" in result.reason
    assert compared(monkeypatch, weights=math.nan).status == "fault"
    assert compared(monkeypatch, curve=LOSSES[:3]).status == "fault"


@pytest.mark.parametrize(
    ("own", "weights", "status", "bound"),
    [
        (5e-9, 2e-9, "passed", 5e-9),
        (5e-9, 6e-9, "fault", 5e-9),
        (5e-10, 2e-9, "fault", 1e-9),
        (1e-6, 2e-8, "fault", 1e-9),
        (1e-6, 9e-9, "passed", 1e-8),
    ],
)
def test_a_strategy_may_differ_by_its_own_rounding(monkeypatch, own, weights, status, bound):
    differences(monkeypatch, {"fsdp-again": 0.0, "fsdp-reversed": own / compare.SAFETY})
    more = {"fsdp-again": [recording(LOSSES)] * 2, "fsdp-reversed": [recording(LOSSES)] * 2}
    result = compared(monkeypatch, weights=weights, check=on_mesh.strategies, **more)
    assert (result.status, result.bound) == (status, pytest.approx(bound))
    assert any("round more than one process" in note for note in result.notes) == (1e-9 < weights <= 1e-8)


def test_a_strategy_that_differs_from_itself_is_not_excused_by_rounding(monkeypatch):
    differences(monkeypatch, {"fsdp-again": 1e-12, "fsdp-reversed": 1.0})
    again = {"fsdp-again": [recording(LOSSES)] * 2}
    result = compared(monkeypatch, weights=2e-9, check=on_mesh.strategies, **again)
    assert (result.status, result.bound) == ("fault", 1e-9)
    assert "2 ranks with fsdp differ when repeated" in result.notes


def differences(monkeypatch, weights):
    """The training `fsdp` differs by so much from others, by their names."""

    def difference(self, name, recordings, other, others):
        assert name == "fsdp"
        return TrainingDifference(weights[other], "0.weight", 0.0)

    monkeypatch.setattr(ExperimentRunner, "_difference", difference)


def test_other_tensors_are_named(monkeypatch):
    assert "model.a" in compared(monkeypatch, missing=("model.a",)).reason


def test_a_likely_cause_is_named(monkeypatch):
    result = compared(monkeypatch, weights=1.0, probe=TaskProbe(epsilon=1e-16, coupling=0.5, mean_heads=["loss"]))
    assert "returns a mean" in result.reason


def test_where_rounding_may_hide_a_fault_nothing_is_shown(monkeypatch):
    assert compared(monkeypatch, weights=0.01, limit=0.02).status == "not shown"
    assert compared(monkeypatch, weights=0.5, limit=0.02).status == "fault"
    assert compared(monkeypatch, weights=0.5, limit=math.inf).status == "not shown"


@pytest.mark.parametrize(("limit", "weights"), [(0.02, 0.01), (math.inf, 0.5), (1e-9, 0.5)])
def test_a_training_that_differs_when_it_is_repeated_shows_nothing(monkeypatch, limit, weights):
    again = [recording([LOSSES[0] + 1, *LOSSES[1:]])] * 2
    result = compared(monkeypatch, weights=weights, limit=limit, again=again)
    assert result.status == "not shown"
    assert result.reason.endswith("the same training already differs when repeated; see determinism")


def test_a_training_that_fails_when_it_is_repeated_hides_no_fault(monkeypatch):
    result = compared(monkeypatch, weights=0.5, undisturbed=Answer(error="it cannot be saved"))
    assert result.status == "fault"
    assert "train a different model" in result.reason


def test_a_cause_of_indeterminism_shows_nothing(monkeypatch):
    probe = TaskProbe(epsilon=1e-16, loss_difference="1 and 2")
    result = compared(monkeypatch, weights=0.5, probe=probe)
    assert result.status == "not shown"
    assert "the loss of the same batch is 1 and 2" in result.reason
    assert result.reason.endswith("see determinism")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"rank_difference": "1 and 2"}, "Task.loss depends on the rank"),
        ({"weight_difference": "it is 4 for a batch, and 4 and 4 for its halves"}, "Task.weight must add up"),
    ],
)
def test_causes_in_the_task_are_named_before_others(monkeypatch, found, said):
    result = compared(monkeypatch, weights=0.5, probe=TaskProbe(epsilon=1e-16, mean_heads=["loss"], **found))
    assert result.status == "fault"
    assert said in result.reason


def test_random_numbers_and_refused_configs_show_nothing(monkeypatch):
    random = TaskProbe(random=["rand"], random_without_dropout=["rand"])
    assert "rand" in compared(monkeypatch, check=replicas.accumulation, probe=random).reason
    refused = compared(monkeypatch, check=on_mesh.strategies, fsdp=Answer(error="fsdp cannot", refused=True))
    assert refused.status == "not shown"
    assert refused.reason.endswith("fsdp cannot")


@pytest.mark.parametrize("check", [replicas.replicas, replicas.probe])
def test_initial_weights_that_differ_are_the_cause(check):
    ranks = [
        recording([1.0], digests={0: {"model.a": (0, 4, (0, rank))}, 1: {"model.a": (0, 4, (0, rank))}})
        for rank in (0, 1)
    ]
    result = check(experiments({"undisturbed": ranks}))
    assert result.status == "fault"
    assert result.reason.startswith("the initial weights differ: a and 0 other tensors")
