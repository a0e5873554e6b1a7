"""Rules on gradients and parameters."""

import pytest

from lockstep_audit.rules.divergence import divergences
from lockstep_audit.rules.gradients import gives_data
from packages.audit.tests.made_events import Script, at


def parted(steps=3, script=None, synced=True, **keys):
    """Replicas that differ from the first step on."""
    script = (script or Script()).optimizer()
    for _ in range(steps):
        script.step(digest=str, synced=synced, **keys)
    return script


def together(steps=3, script=None, **keys):
    script = (script or Script()).optimizer()
    for _ in range(steps):
        script.step(**keys)
    return script


def test_replicas_that_part_are_named_with_the_first_step_and_no_invented_cause():
    (finding,) = parted().found("LS201")
    assert (finding.step, finding.cause) == (0, None)
    assert "1 of 2 gradients differ (weight) and 1 of 2 parameters differ (weight)" in finding.evidence


def test_parameters_that_differ_under_equal_gradients_were_not_equal_before():
    script = parted()
    for event in script.events:
        if event["kind"] == "step":
            event["gradients"] = {"weight": "g", "bias": "b"}
    assert "before training" in script.found("LS201")[0].cause


@pytest.mark.parametrize(
    "script",
    [
        together(),
        parted(script=Script(how="fsdp2")),  # shards differ by nature
        parted(script=Script(how=None)),  # nothing averages: another experiment on each rank
        parted().add("hand_average", at=at(40), op="avg"),
        parted(synced=False).add("collective", at=at(40), op="all_reduce", dtype="torch.float32", shape=[64, 8]),
        parted().step(),  # together again
        parted().exit(parameters={"0": "equal"}),
        parted(script=Script().add("hook", model=0)),
        together().step(skipped=True),
    ],
    ids=["equal", "shards", "alone", "averages", "local SGD", "again", "at the end", "hook", "skipped"],
)
def test_scripts_that_are_right_do_not_part(script):
    assert script.errors() == set()


def test_a_first_step_at_a_rate_of_0_leaves_parameters_equal_and_does_not_bring_replicas_together():
    script = Script().optimizer().step(digest=str, synced=False)
    for event in script.events[-2:]:
        event["parameters"] = {"weight": "w", "bias": "b"}
    script.step(digest=str, synced=False)
    assert script.found("LS204")[0].step == 0


def test_a_layer_beside_a_wrapped_model_parts_though_evaluations_gather_features():
    script = Script().optimizer(unwrapped=["weight"], owned=1, foreign=1)
    for step in range(3):
        script.step(digest=str)
        script.add("loader", loader=1, epoch=step, at=at(40), dataset_size=64)
        script.add("collective", at=at(41), op="all_gather", dtype="torch.float32", shape=[64, 16])
        script.add("loader_end", loader=1, epoch=step, batches=2, backwards=0, forwards_eval=2, is_complete=True)
    (divergence,) = divergences(script.exit(parameters={"0": {"bias": "b"}}).history)[0]
    assert divergence.parameters == ["weight"]
    script.add(
        "collective", at=at(42), op="all_gather", dtype="torch.float32", shape=[64, 16]
    )  # outside of evaluations
    assert divergences(script.history)[0] == []


def test_ignored_parameters_may_differ():
    script = Script(how=None).add("wrap", at=at(5), model=0, how="ddp", ignored=["weight"])
    assert parted(script=script).errors() == set()


def test_a_call_past_the_wrapper_is_the_cause_only_where_gradients_differ():
    bypassed = Script().add("bypass", at=at(22), model=0)
    (finding,) = parted(script=bypassed).found("LS202")
    assert finding.where.line == 22
    assert parted(script=Script().add("bypass", at=at(22), model=0)).errors() == {"LS202"}
    penalty = together(script=Script().add("bypass", at=at(22), model=0))  # a gradient penalty beside a wrapped pass
    assert penalty.errors() == set()


def test_uses_of_parts_of_a_model_are_the_cause_where_no_pass_came_from_the_wrapper():
    def past(forwards, is_told=True):
        script = parted(synced=False)
        for event in script.events:
            for each in event.get("backwards", []):
                each |= {"forwards": forwards, "loss_at": at(23)}
        return script.add("bypass", at=at(22), model=0, part=True) if is_told else script

    (finding,) = past(0).found("LS202")
    assert (finding.where.line, past(0).errors()) == (22, {"LS202"})
    assert "uses of parts of model.module" in finding.cause
    assert past(1).errors() == {"LS204"}  # beside a pass of the wrapper
    assert past(0).add("bypass", at=at(9), model=1).found("LS202") == [finding]  # another model
    (finding,) = past(0, is_told=False).found("LS204")
    assert (finding.where.line, "no forward pass of the wrapper" in finding.cause) == (23, True)


def test_parameters_that_were_unfrozen_late_are_named():
    late = parted(script=Script().add("unfrozen", at=at(28), model=0, names=["weight"]))
    (finding,) = late.found("LS203")
    assert finding.where.line == 28
    assert "did not require gradients at train.py:5" in finding.cause
    assert late.errors() == {"LS203"}
    assert together(script=Script().add("unfrozen", at=at(28), model=0, names=["weight"])).errors() == set()
    other = parted(script=Script().add("unfrozen", at=at(28), model=0, names=["bias"]))
    assert other.found("LS203") == []


def test_steps_without_any_exchange_are_named():
    script = parted(synced=False, backwards=2)
    (finding,) = script.found("LS204")
    assert (finding.where.line, script.errors()) == (25, {"LS204"})
    assert "under no_sync()" in finding.cause
    for event in script.events:
        for each in event.get("backwards", []):
            each["flag_set_late"] = True
    assert "the forward pass decides" in script.found("LS204")[0].cause
    assert together(synced=False).errors() == set()  # the script reduces gradients itself
    averaged = parted(synced=False).add("hand_average", at=at(40), op="avg")
    assert averaged.errors() == set()


def reduced(script=None, ops=("NllLossBackward0",), divisor=None, **keys):
    script = (script or Script(how=None)).optimizer()
    script.add("hand_reduce", at=at(27), op="SUM", parameters=2, **keys)
    script.step()
    for event in script.events:
        for each in event.get("backwards", []):
            each |= {"ops": list(ops), "divisor": divisor}
    return script


def test_a_sum_of_gradients_that_nobody_divides_is_named():
    (finding,) = reduced(divided=False).found("LS205")
    assert finding.where.line == 27
    assert reduced(divided=False).errors() == {"LS205"}
    assert reduced(divided=False, divisor=3).errors() == {"LS205"}  # by the accumulation
    bias = Script(how=None).add("collective", at=at(27), op="all_reduce", shape=[2], dtype="torch.float32")
    assert reduced(bias, divided=False).errors() == {"LS205"}


@pytest.mark.parametrize(
    "script",
    [
        reduced(divided=True),
        reduced(),  # not known
        reduced(divided=False, ops=("DivBackward0", "SumBackward0")),  # by the global batch
        reduced(divided=False, divisor=64),
        reduced(
            Script(how=None).add("collective", at=at(24), op="all_reduce", shape=[], dtype="torch.int64"), divided=False
        ),
    ],
    ids=["divided", "unknown", "loss divided", "by the batch", "count"],
)
def test_sums_that_are_divided_elsewhere_are_right(script):
    assert script.found("LS205") == []


def test_a_rank_that_leaves_out_a_step_is_named():
    script = Script().optimizer().step().step(backwards=lambda rank: 1 + rank).step()
    (finding,) = script.found("LS206")
    assert finding.evidence.endswith("2 on rank 0, 3 on rank 1")
    ended = Script().optimizer().step().step(rank=0).exit()
    assert "2 on rank 0, 1 on rank 1" in ended.found("LS206")[0].evidence


@pytest.mark.parametrize(
    "script",
    [
        Script().optimizer().step().step().exit(),
        Script().optimizer().step().step(rank=0),  # no rank has ended: one is a step behind
        Script().optimizer().step().step(rank=0).add("loader_end", loader=0, joined=True).exit(),
        Script().optimizer().step(synced=False, backwards=lambda rank: 1 + rank),  # local SGD
        Script(how=None).optimizer().step().step(rank=0).exit(),
        Script().optimizer().step().step(rank=0).exit(0).exit(1, code=1, error={"message": "disk full"}),
        Script().optimizer().step(skipped=True, scaler={"scale": 2.0}).step(scaler={"scale": 1.0}).exit(),
    ],
    ids=["equal", "running", "join", "local", "alone", "failed", "scaler"],
)
def test_scripts_that_are_right_make_equal_steps(script):
    assert script.found("LS206") == []


def test_a_gan_has_two_optimizers_and_no_finding():
    script = Script().add("wrap", at=at(6), model=1, how="ddp").optimizer(0, 7).optimizer(1, 8)
    for _ in range(4):
        script.step(number=0).step(number=1)
    for event in script.events:  # the first optimizer also sees the backward pass of the second
        if event["kind"] == "step" and event["optimizer"] == 0:
            event["backwards"] = event["backwards"] * 2
    assert script.exit().ids() == set()


def wrote(script, name, digest, line=15, rank=None):
    return script.add("write", rank, at=at(line), name=name, digest=digest)


def test_writes_after_the_wrapping_that_ranks_do_not_make_alike_are_named():
    def parted():
        return Script().optimizer(line=7)

    def end(script):
        (finding,) = script.step(digest=lambda rank: "ab"[rank], gradients={"weight": "g", "bias": "b"}).found("LS201")
        return finding.where.line, finding.cause

    alike = wrote(wrote(parted(), "weight", "same", line=14), "bias", lambda rank: str(rank), line=16)
    line, cause = end(wrote(alike, "weight", lambda rank: str(rank)))
    assert line == 15
    assert "train.py:5 had made the ranks equal" in cause
    assert "weight different values on each rank" in cause
    line, cause = end(wrote(parted(), "weight", "same", rank=1))
    assert line == 15
    assert "on rank 1" in cause
    assert end(wrote(parted(), "weight", "same"))[0] != 15
    assert wrote(parted(), "weight", lambda rank: str(rank)).step().errors() == set()


def test_numbers_that_data_is_given_are_found_in_the_text(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "class Norm:\n    def __init__(self):\n        self.scale.data = ones\n\n    def begin(self, x):\n"
        "        self.scale.data = x.std(0)\n        self.other.weight.data = x\n"
    )
    assert gives_data(str(path), ["0.scale"]) == [6]
    assert gives_data(str(path), ["0.weight"]) == []
