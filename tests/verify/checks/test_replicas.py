"""Whether trainings are the same however they are spread, on trials that a test makes up."""

import math

import pytest

from lockstep.verify import compare
from lockstep.verify.checks import replicas
from lockstep.verify.checks.replicas import _differing, _lacking
from lockstep.verify.compare import Difference
from lockstep.verify.experiments import ExperimentFailed, Experiments
from lockstep.verify.step_operations import Communication
from lockstep.verify.task_probe import TaskProbe
from lockstep.verify.worker_functions import Answer
from tests.verify.made_up import bench, seen

# ---- probe


def probed(*losses, nproc=2):
    """`losses`: of each rank, by head, after step 6; after step 1 all are alike."""
    probes = {
        6: [{head: value.hex() for head, value in one.items()} for one in losses],
        1: [{"loss": "0x1.0p+0"}] * len(losses),
    }
    return replicas.probe(bench({"undisturbed": [seen([1.0], probes=probes)] * nproc}, nproc=nproc))


def test_the_same_losses_of_one_batch_pass():
    verdict = probed({"a": 1.5, "b": 2.0}, {"a": 1.5, "b": 2.0})
    assert verdict.status == "passed"
    assert verdict.reason == "one batch has the same loss on 2 ranks after steps 1, 6"


def test_the_last_bit_of_one_head_on_one_rank_is_a_fault():
    other = math.nextafter(2.0, 3.0)
    verdict = probed({"a": 1.5, "b": 2.0}, {"a": 1.5, "b": 2.0}, {"a": 1.5, "b": other}, nproc=3)
    assert verdict.status == "fault"
    assert "after step 6 the b of one batch is 2 on rank 0 and 2 on rank 2" in verdict.reason
    assert verdict.value == other - 2.0


def test_one_rank_has_none_to_be_compared_with():
    for check in (replicas.probe, replicas.replicas, replicas.ranks, replicas.strategies):
        assert check(bench(nproc=1)).status == "not shown"


# ---- replicas


def held(*tables, shapes=None, **more):
    """What each rank holds after step 1: by name (first row, rows, digest)."""
    shapes = shapes or {"model.a": (6, 2), "model.b": (3,), "optimizer.a.step": ()}
    return [seen([1.0], digests={1: table}, shapes=shapes, **more) for table in tables]


WHOLE = {"model.a": (0, 6, 11), "model.b": (0, 3, 12), "optimizer.a.step": (0, 1, 13)}
UPPER = {"model.a": (0, 3, 21), "model.b": (0, 2, 22), "optimizer.a.step": (0, 1, 13)}
LOWER = {"model.a": (3, 3, 31), "model.b": (2, 1, 32), "optimizer.a.step": (0, 1, 13)}
NOTHING_OF_B = {"model.a": (3, 3, 31), "model.b": (3, 0, 0), "optimizer.a.step": (0, 1, 13)}


def replicated(*tables, **more):
    return replicas.replicas(bench({"undisturbed": held(*tables, **more)}))


def test_replicas_that_are_the_same_pass():
    assert _differing(held(WHOLE, WHOLE), 1) == []
    assert _lacking(held(WHOLE, WHOLE), 1) is None
    verdict = replicated(WHOLE, WHOLE)
    assert verdict.status == "passed"
    assert verdict.reason == "3 tensors are the same on all ranks after each of 1 steps"


def test_shards_that_make_a_whole_pass():
    assert (
        replicated(UPPER, LOWER, sharded=True).reason
        == "3 tensors are one whole copy between the ranks after each of 1 steps"
    )


def test_a_rank_may_hold_no_row():
    whole_of_b = UPPER | {"model.b": (0, 3, 22)}
    assert _lacking(held(whole_of_b, NOTHING_OF_B), 1) is None
    assert _differing(held(whole_of_b, NOTHING_OF_B), 1) == []


def test_replicas_of_shards_are_compared_with_each_other():
    four = held(UPPER, LOWER, UPPER, LOWER)
    assert _differing(four, 1) == []
    assert _lacking(four, 1) is None
    assert _differing(held(UPPER, LOWER, UPPER, LOWER | {"model.b": (2, 1, 99)}), 1) == [("model.b", (1, 3))]


def test_a_tensor_that_differs_is_named_with_its_ranks():
    assert _differing(held(WHOLE, WHOLE | {"model.b": (0, 3, 99)}), 1) == [("model.b", (0, 1))]
    assert _differing(held(WHOLE, WHOLE, WHOLE | {"model.b": (0, 3, 99), "model.a": (0, 6, 98)}), 1) == [
        ("model.a", (0, 2)),
        ("model.b", (0, 2)),
    ]
    verdict = replicated(WHOLE, WHOLE | {"model.b": (0, 3, 99), "model.a": (0, 6, 98)})
    assert verdict.status == "fault"
    assert (verdict.reason, verdict.value) == (
        "model.a differs between ranks 0 and 1 since step 1, with 1 other tensors",
        2.0,
    )


def test_a_counter_that_differs_between_shards_is_found():
    assert _differing(held(UPPER, LOWER | {"optimizer.a.step": (0, 1, 14)}), 1) == [("optimizer.a.step", (0, 1))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (UPPER, LOWER | {"model.a": (4, 2, 31)}),
        (UPPER | {"model.a": (1, 2, 1)}, LOWER),
        (UPPER, LOWER | {"model.a": (3, 2, 31)}),
        (UPPER, UPPER),
    ],
    ids=["between", "first", "last", "half"],
)
def test_a_missing_row_is_found(one, other):
    assert _lacking(held(one, other), 1) == "model.a"
    verdict = replicated(one, other)
    assert verdict.status == "fault"
    assert "no whole copy of model.a" in verdict.reason


def test_a_tensor_that_a_rank_knows_nothing_of_is_found():
    without = {name: rows for name, rows in WHOLE.items() if name != "model.b"}
    assert _lacking(held(WHOLE, without), 1) == "model.b"
    first, other = held(without, WHOLE)
    first.shapes = {"model.a": (6, 2), "optimizer.a.step": ()}
    assert _lacking([first, other], 1) == "model.b"


def test_state_that_appears_later_is_not_missing_before():
    """Such as an optimizer's, of what is frozen at first."""
    ranks = held(WHOLE, WHOLE)
    for one in ranks:
        one.digests[2] = WHOLE | {"optimizer.b.step": (0, 1, 5)}
        one.shapes = one.shapes | {"optimizer.b.step": ()}
    assert replicas.replicas(bench({"undisturbed": ranks})).status == "passed"


def test_the_first_step_that_differs_is_named():
    ranks = held(WHOLE, WHOLE)
    for number, one in enumerate(ranks):
        one.digests |= {
            2: WHOLE,
            3: WHOLE | {"model.b": (0, 3, 50 + number)},
            4: WHOLE | {"model.a": (0, 6, 50 + number)},
        }
    assert (
        "model.b differs between ranks 0 and 1 since step 3" in replicas.replicas(bench({"undisturbed": ranks})).reason
    )


# ---- the same model

LOSSES = [4.0, 3.0, 2.0, 1.0]


def compared(
    monkeypatch, weights=0.0, curve=LOSSES, limit=1e-9, missing=(), nature=None, check=replicas.ranks, **answers
):
    monkeypatch.setattr(Experiments, "limit", lambda self: limit)
    monkeypatch.setattr(
        Experiments,
        "apart",
        lambda self, name, mine: Difference(
            weights, "0.weight", compare.curve_difference(LOSSES, mine[0].losses), missing
        ),
    )
    given = {
        "one-process": seen(LOSSES),
        "2-ranks": [seen(curve), seen(curve)],
        "accumulated": [seen(curve)] * 2,
        "fsdp": [seen(curve)] * 2,
    }
    return check(bench(given | {"nature": nature or TaskProbe(epsilon=1e-16)} | answers, steps=4))


def test_the_same_model_passes(monkeypatch):
    for check in (replicas.ranks, replicas.accumulation, replicas.strategies):
        verdict = compared(monkeypatch, weights=1e-10, check=check)
        assert (verdict.status, verdict.value, verdict.bound) == ("passed", 1e-10, 1e-9)
        assert verdict.curves["one process"] == LOSSES


def test_other_weights_and_other_losses_are_a_fault(monkeypatch):
    assert compared(monkeypatch, weights=1e-8).status == "fault"
    verdict = compared(monkeypatch, curve=[4.0, 3.0, 2.1, 1.0])
    assert verdict.status == "fault"
    assert "since step 3" in verdict.reason
    assert compared(monkeypatch, weights=math.nan).status == "fault"
    assert compared(monkeypatch, curve=LOSSES[:3]).status == "fault"


def test_other_tensors_are_named(monkeypatch):
    assert "model.a" in compared(monkeypatch, missing=("model.a",)).reason


def test_a_likely_cause_is_named(monkeypatch):
    verdict = compared(monkeypatch, weights=1.0, nature=TaskProbe(epsilon=1e-16, coupling=0.5, means=["loss"]))
    assert "returns a mean" in verdict.reason


def test_where_rounding_may_hide_a_fault_nothing_is_shown(monkeypatch):
    assert compared(monkeypatch, weights=0.01, limit=0.02).status == "not shown"
    assert compared(monkeypatch, weights=0.5, limit=0.02).status == "fault"
    assert compared(monkeypatch, weights=0.5, limit=math.inf).status == "not shown"


def test_random_numbers_and_refused_configs_show_nothing(monkeypatch):
    assert "rand" in compared(monkeypatch, nature=TaskProbe(random=["rand"], still_random=["rand"])).reason
    refused = compared(monkeypatch, check=replicas.strategies, fsdp=Answer(error="fsdp cannot", refused=True))
    assert refused.status == "not shown"
    assert refused.reason.endswith("fsdp cannot")


# ---- elastic


def consuming(steps, table, curve):
    return seen(curve, samples=[(step, 0, table[step]) for step in steps])


TABLE = {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}


def stretched(monkeypatch, table=TABLE, nproc=2):
    alone = consuming(range(4), TABLE, LOSSES)
    begun, resumed = consuming(range(2), table, LOSSES[:2]), consuming(range(2, 4), table, LOSSES[2:])
    return compared(
        monkeypatch, check=replicas.elastic, **{"one-process": alone, "elastic": begun, "elastic-resumed": resumed}
    )


def test_going_on_with_the_same_samples_passes(monkeypatch):
    verdict = stretched(monkeypatch)
    assert verdict.status == "passed"
    assert verdict.curves["2 ranks, then 1"] == LOSSES


def test_going_on_with_other_samples_is_a_failed_trial(monkeypatch):
    with pytest.raises(ExperimentFailed, match="go on with other samples"):
        stretched(monkeypatch, TABLE | {3: (6, 6)})


def test_one_rank_goes_on_on_two_where_there_are_as_many():
    made = bench(nproc=1)
    assert made.most_ranks == 2


# ---- collectives

SHAPES = {"a": (5, 3), "b": (7,)}  # 22 elements; 6 * 3 + 8 = 26 with rows padded for two ranks
DDP, FSDP = [15, 7], [18, 8]


def talked(*steps, rank_1=None, nproc=2, sharded=False, **sections):
    """steps: what was said in each that was listened to."""
    talks = dict(enumerate(steps, 2))
    ranks = [seen([1.0], talk=talks, trainable=SHAPES, sharded=sharded)] + [
        seen([1.0], talk=rank_1 or talks, trainable=SHAPES, sharded=sharded)
    ] * (nproc - 1)
    return replicas.collectives(bench({"overheard": ranks}, nproc=nproc, **sections))


def test_each_gradient_once_passes():
    verdict = talked(Communication(reductions=DDP, small=[1]))
    assert (verdict.status, verdict.value) == ("passed", 1.0)
    assert "2 reductions of 22 elements in a step of 4 micro-batches, for 22 parameters" in verdict.reason


def test_padded_shards_pass_and_unpadded_numbers_do_not():
    fsdp = {"sharded": True, "parallel": {"strategy": "fsdp"}}
    assert talked(Communication(reductions=FSDP, small=[1, 1]), **fsdp).status == "passed"
    assert talked(Communication(reductions=DDP, small=[1, 1]), **fsdp).status == "fault"
    assert talked(Communication(reductions=FSDP)).status == "fault"


def test_wasted_and_missing_reductions_are_faults():
    verdict = talked(Communication(reductions=DDP * 3))
    assert (verdict.status, verdict.value) == ("fault", 3.0)
    assert talked(Communication(reductions=[15])).status == "fault"
    assert talked(Communication()).status == "fault"


def test_the_quietest_step_counts():
    noisy = Communication(reductions=DDP, small=[1, 1, 2, 2], others=["allgather"])
    assert talked(noisy, Communication(reductions=DDP, small=[1])).status == "passed"
    verdict = talked(noisy, noisy)
    assert verdict.status == "fault"
    assert "4 small reductions" in verdict.reason


def test_a_wait_of_the_package_is_a_fault_on_any_rank_and_in_any_step():
    ours = ("step.py:12", True)
    assert "at step.py:12" in talked(Communication(reductions=DDP, waits=[ours])).reason
    quiet = Communication(reductions=DDP)
    assert talked(quiet, Communication(reductions=DDP, small=[1], waits=[ours])).status == "fault"
    assert talked(quiet, rank_1={2: Communication(reductions=DDP, waits=[ours])}).status == "fault"


def test_a_wait_of_the_task_is_a_note():
    verdict = talked(Communication(reductions=DDP, waits=[("mine.py:3", False)]))
    assert verdict.status == "passed"
    assert verdict.notes == ["the task itself makes the host wait for the device, at mine.py:3"]


def test_the_loss_scaler_may_wait():
    waits = [("step.py:1", True), ("step.py:2", True), ("step.py:3", True)]
    assert talked(Communication(reductions=DDP, waits=waits), precision="fp16").status == "passed"
    assert (
        talked(Communication(reductions=DDP, waits=[*waits, ("step.py:4", True)]), precision="fp16").status == "fault"
    )
    assert talked(Communication(reductions=DDP, waits=waits)).status == "fault"


def test_one_rank_need_not_talk_and_must_not_wait():
    assert talked(Communication(), nproc=1).status == "passed"
    assert talked(Communication(waits=[("step.py:1", True)]), nproc=1).status == "fault"


def test_groups_of_ranks_and_too_few_steps_show_nothing():
    hybrid = {"parallel": {"strategy": "fsdp", "shard_ranks": 2}, "sharded": True, "nproc": 4}
    assert talked(Communication(reductions=FSDP), **hybrid).status == "not shown"
    assert talked().status == "not shown"
