"""`lockstep bisect`: changes between two runs are named at their stage, with their cause."""

import json

import pytest

from lockstep.cli import application as cli
from lockstep_lab.bisect import bisect as bisecting
from lockstep_lab.bisect import recorded
from lockstep_lab.bisect.recorded import Suspect
from lockstep_lab.bisect.trace import STAGES, Difference, Operation, StepTrace, TensorDigest, Trace, first_difference
from lockstep_lab.bisect.verdict import _CAUSES, judged
from tests.selection import mainly

from . import cases


@pytest.mark.parametrize("name", mainly(["flipped gradient"], cases.CHANGES))
def test_a_change_is_named_at_its_stage_with_its_cause(name, tmp_path):
    change, stage, cause, part = cases.CHANGES[name]
    pair = cases.Pair(tmp_path)
    pair.fit("a")
    change(pair)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    found = bisecting.bisect((tmp_path / "a", tmp_path / "b"), lambda text: None)
    assert found.stage == stage, found
    assert cause in found.cause, found
    assert part in found.sentence, found
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.exhaustive
def test_the_command_says_that_nothing_differs(tmp_path, monkeypatch, capsys):
    pair = cases.Pair(tmp_path)
    pair.fit("a")
    pair.fit("b")
    words = ["lockstep", "bisect", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "answer.json")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "No difference in 20 steps" in capsys.readouterr().out
    assert json.loads((tmp_path / "answer.json").read_text())["stage"] == ""


def test_a_run_that_cannot_be_trained_again_is_an_error_that_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lockstep", "bisect", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "not a run directory" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("task: {}")
    with pytest.raises(recorded.UsageError, match="cannot be trained again from its directory"):
        recorded.read(tmp_path)


# ---- traces


def step(number, **stages):
    base = {"order": [(0, 1), (0, 2)], "split": [2], "file": {(0, 1): "a.png", (0, 2): "b.png"}}
    return StepTrace(number, base | stages, detailed=True)


def first(one, other):
    """The first difference of two traces on one rank, as (step, stage, sample, what)."""
    found = first_difference([Trace(steps=one)], [Trace(steps=other)])
    return found and (found.step, found.stage, found.sample, found.what)


def test_the_first_stage_of_the_first_step_is_named():
    weights = {f"model.{name}": TensorDigest(("float32", (2,), 1, place)) for place, name in enumerate("abc")}
    others = weights | {f"model.{name}": TensorDigest(("float32", (2,), 1, 9)) for name in "bc"}
    assert first([step(1)], [step(1)]) is None
    assert first([step(1), step(2, weights=weights)], [step(1), step(2, weights=others)]) == (
        (2, "weights", "", "model.b, and 1 more of 3")
    )
    product = Operation("aten::mm", TensorDigest((1,)), "a.py:3")
    operations = [[product, Operation("aten::relu", TensorDigest((2,)), line)] for line in ("a.py:4", "a.py:5")]
    assert first([step(1, forward=operations[0])], [step(1, forward=operations[1])]) is None  # a line has moved
    operations[1][1] = Operation("aten::gelu", TensorDigest((2,)), "a.py:5")
    what = "operation 2, aten::relu at a.py:4 against aten::gelu at a.py:5"
    assert first([step(1, forward=operations[0])], [step(1, forward=operations[1], loss={"l": "1"})]) == (
        (1, "forward", "", what)
    )
    changed = [step(1, bytes={(0, 1): "x", (0, 2): end}, loss={"l": end}) for end in "yz"]
    assert first(changed[:1], changed[1:]) == (1, "bytes", "sample 2 (b.png)", "y against z")
    settings = [step(1, settings={"lr of a": rate, "eps of a": 1e-8}) for rate in (0.1, 0.2)]
    assert first(settings[:1], settings[1:]) == (1, "settings", "", "lr of a: 0.1 against 0.2, of 2")
    drawn = [step(1, order=[(0, 1), (0, last)]) for last in (2, 3)]
    assert first(drawn[:1], drawn[1:]) == (1, "order", "", "sample 2 against 3")


def test_ranks_are_compared_one_by_one_and_a_different_split_comes_first():
    ranks = [[Trace(steps=[step(1, loss={"l": value})]) for value in values] for values in ("11", "12")]
    found = first_difference(*ranks)
    assert (found.stage, found.rank, found.what) == ("loss", 1, "l: 1 against 2")
    halves = [Trace(steps=[step(1, order=[(0, index)], split=[1])]) for index in (1, 2)]
    found = first_difference([Trace(steps=[step(1)])], halves)
    assert (found.stage, found.what) == (
        "split",
        "1 rank with micro-batches of 2 against 2 ranks with micro-batches of 1",
    )
    found = first_difference([Trace(setup={"default dtype": "a"})], [Trace(setup={"default dtype": "b"})])
    assert (found.step, found.stage, found.what) == (0, "setup", "default dtype: a against b")


def test_the_cause_is_the_recorded_difference_that_explains_the_stage():
    assert _CAUSES.keys() == STAGES.keys()
    suspects = [Suspect("optim.lr", "optim.lr: 1 against 2"), Suspect("library", "x 1 against 2"),
                Suspect("source", "the code"), Suspect("seed", "seed: 0 against 1")]  # fmt: skip
    for stage, cause in (("settings", "optim.lr"), ("decoded", "the code"), ("weights", "seed"), ("prepared", "seed")):
        verdict = judged(Difference(3, stage, 0, "w"), suspects, "b", 1)
        assert verdict.cause.startswith(cause), stage
        assert len(verdict.others) == 3
    verdict = judged(Difference(1, "weights", 0, "w"), [], "b", 1)
    assert verdict.sentence == (
        "First difference: step 1, rank 0: the initial weights (w). Nothing that the runs record explains it"
    )


def test_logs_are_compared_in_the_order_of_a_step():
    one = [{"step": step, "train/loss": 1.0, "train/grad_norm": 2.0, "train/lr": 0.1} for step in (5, 10, 15)]
    one.append({"step": 15, "eval/loss": 3.0})
    assert recorded.first_figure(one, [dict(entry) for entry in one]) is None
    other = [dict(entry) for entry in one]
    other[3]["eval/loss"] = 4.0
    assert recorded.first_figure(one, other) == (11, 15, "eval/loss", "3.0 against 4.0")
    other[1] |= {"train/loss": 1.5, "train/grad_norm": 2.5}
    assert recorded.first_figure(one, other) == (6, 10, "train/loss", "1.0 against 1.5")
