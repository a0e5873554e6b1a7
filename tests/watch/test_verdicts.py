"""Ranks that lie are found, with the right verdict, and a run resumes from a checked checkpoint."""

import types

import pytest
import torch

from lockstep.core.checkpoint import store
from lockstep.watch import evidence
from lockstep.watch.verdict import Verdict
from tests.ranks import run_ranks
from tests.selection import mainly
from tests.watch import cases

# Strategy and ranks; fault; kind and ranks of the verdict; the tensor; the step at which it is found.
FAULTS = {
    "ddp 3, activation": ("ddp", 3, {"kind": "activation", "after": 10}, ("device", [1], "the loss", 9)),
    "ddp 3, gradient": (
        "ddp",
        3,
        {"kind": "gradient", "after": 10},
        ("device", [1], "the gradient of inner.weight", 9),
    ),
    "ddp 3, low bit": ("ddp", 3, {"kind": "gradient", "after": 10, "bit": 0}, ("device", [1], "inner.weight", 9)),
    "ddp 3, activation once": (
        "ddp",
        3,
        {"kind": "activation", "after": 12, "times": 1, "rank": 2},
        ("device", [2], "", 9),
    ),
    "ddp 3, weight": ("ddp", 3, {"kind": "weight", "after": 10}, ("device", [1], "model.scale", 8)),
    "ddp 3, weight once": ("ddp", 3, {"kind": "weight", "after": 10, "times": 1}, ("memory", [1], "model.scale", 8)),
    "ddp 2, weight once": (
        "ddp",
        2,
        {"kind": "weight", "after": 9, "times": 1, "rank": 0},
        ("memory", [0], "model.scale", 8),
    ),
    "ddp 3, optimizer": ("ddp", 3, {"kind": "optimizer", "after": 10}, ("device", [1], "scale", 8)),
    "ddp 3, reduced": ("ddp", 3, {"kind": "reduced", "after": 13}, ("link", [1], "", 9)),
    "ddp 3, reduced earlier": ("ddp", 3, {"kind": "reduced", "after": 10}, ("link", [1], "model.scale", 8)),
    "ddp 3, drift": ("ddp", 3, {"kind": "drift", "after": 10, "rank": 2}, ("device", [2], "model.", 8)),
    "fsdp 3, activation": ("fsdp", 3, {"kind": "activation", "after": 9}, ("device", [1], "the loss", 9)),
    "fsdp 3, gradient": ("fsdp", 3, {"kind": "gradient", "after": 9}, ("device", [1], "inner.weight", 9)),
    "fsdp 3, reduced": ("fsdp", 3, {"kind": "reduced", "after": 12}, ("memory", [1], "inner.weight", 9)),
}
KEPT = ["ddp 3, activation", "ddp 2, weight once", "fsdp 3, reduced"]


@pytest.mark.parametrize("name", mainly(KEPT, list(FAULTS)))
def test_a_fault_is_found_with_its_rank(tmp_path, name):
    strategy, world, fault, (kind, ranks, tensor, step) = FAULTS[name]
    texts = run_ranks(world, cases.end_of, fault, cases.settings(world, strategy), tmp_path)
    verdict = cases.verdict_of(tmp_path)
    assert (verdict["kind"], verdict["ranks"], verdict["guilty"]) == (kind, ranks, ranks)
    assert tensor in verdict["tensor"]
    assert verdict["step"] == step
    assert f"the watch ends the run at step {step}: {kind}: " in (tmp_path / "train.log").read_text()
    for rank, text in enumerate(texts):
        assert f"step {step}, watch.every=3: {kind}: " in text
        assert "The last check that counts is that of step 6. No check looked at the gradients of steps 4 to 5." in text
        assert cases.evidence_of(tmp_path, step, rank)["rank"] == rank
    aside = [8] if step == 9 else []
    assert cases.saved(tmp_path) == ([2, 4, 6], aside)
    assert store.listed(tmp_path / "checkpoints")[0].checked_step == 6
    if name == KEPT[0]:
        kept = cases.evidence_of(tmp_path, step, 0)
        assert kept["facts"]["repeats"][1][0].losses != kept["facts"]["repeats"][0][0].losses
        assert len(kept["inputs"][0]) == len(kept["indices"]) == 8
        assert any("same command resumes from the last checked checkpoint, of step 6" in text for text in texts)
        # The machine is repaired: the same command goes on, from what was checked, to the end.
        assert run_ranks(world, cases.end_of, None, cases.settings(world, strategy), tmp_path) == [None] * 3
        assert cases.saved(tmp_path) == ([2, 4, 6, 8, 10, 12], aside)


@pytest.mark.parametrize(
    ("task", "world", "kind", "ranks", "says"),
    [
        ("Named", 2, "code", [0, 1], "behaves differently by rank"),
        pytest.param("Named", 3, "code", [1], "mul at cases.py", marks=pytest.mark.exhaustive),
        ("OtherBytes", 3, "data", [1], "rank 1 read different bytes for samples "),
        pytest.param("Unseeded", 2, "data", [0, 1], "differ when they are read", marks=pytest.mark.exhaustive),
    ],
)
def test_code_and_data_are_told_apart_from_devices(tmp_path, task, world, kind, ranks, says):
    settings = cases.settings(world, "ddp")
    for text in run_ranks(world, cases.end_of, None, settings, tmp_path, task):
        assert f"step {12 if task == 'OtherBytes' else 3}, watch.every=3: {kind}: " in text
        assert says in text
    verdict = cases.verdict_of(tmp_path)
    assert (verdict["kind"], verdict["ranks"], verdict["guilty"]) == (kind, ranks, [])


@pytest.mark.exhaustive
def test_a_training_that_does_not_repeat_is_compared_within_rounding_and_a_fault_beyond_is_found(tmp_path):
    settings = cases.settings(3, "ddp", train={"steps": 9})
    assert run_ranks(3, cases.end_of, None, settings, tmp_path / "clean", "Trembling") == [None] * 3
    log = (tmp_path / "clean/train.log").read_text()
    assert log.count("has a different loss or gradient when recomputed, first in mul at cases.py") == 1
    assert store.listed(tmp_path / "clean/checkpoints")[0].checked_step == 9
    fault = {"kind": "activation", "after": 14}
    texts = run_ranks(3, cases.end_of, fault, settings, tmp_path / "faulty", "Trembling")
    assert all("device: the device of rank 1" in text for text in texts)


def test_a_loss_that_draws_without_a_seed_passes_no_check(tmp_path):
    assert run_ranks(1, cases.end_of, None, cases.settings(1, "single"), tmp_path, "UnseededLoss") == [None]
    assert (tmp_path / "train.log").read_text().count("it draws unseeded numbers, or its terms cancel") == 1
    assert {one.checked_step for one in store.listed(tmp_path / "checkpoints")} == {-1}


@pytest.mark.exhaustive
def test_deterministic_algorithms_leave_no_excuse(tmp_path):
    settings = cases.settings(3, "ddp", compute={"deterministic": True})
    fault = {"kind": "activation", "share": 0.5}
    for text in run_ranks(3, cases.end_of, fault, settings, tmp_path):
        assert "device: the device of rank 1" in text


def test_without_recomputation_replicas_are_compared_alone(tmp_path):
    settings = cases.settings(2, "ddp", watch={"recompute": False})
    assert run_ranks(2, cases.end_of, {"kind": "activation"}, settings, tmp_path) == [None, None]
    assert "the watch only compares replicas: watch.recompute=false" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("kind", mainly(["Diverging"], ["Diverging", "DivergingTrembling"]))
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_a_model_that_diverges_is_no_fault_of_a_device(tmp_path, strategy, kind):
    for text in run_ranks(2, cases.end_of, None, cases.settings(2, strategy), tmp_path, kind):
        assert "watch" not in text
        assert "step 11, " in text  # the loop names the step, the samples, and what to set
        assert "optim.clip_norm" in text
    assert cases.verdict_of(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [
        ("Faint", 2, {"strategy": "ddp"}),
        pytest.param("Single", 3, {"strategy": "fsdp", "reduce_dtype": "bf16"}, marks=pytest.mark.exhaustive),
    ],
)
def test_rounding_of_an_exchange_is_no_fault_of_a_link(tmp_path, kind, world, parallel):
    settings = cases.settings(world, parallel["strategy"], parallel=parallel)
    assert run_ranks(world, cases.end_of, None, settings, tmp_path, kind) == [None] * world
    assert cases.verdict_of(tmp_path) is None


def test_evidence_that_cannot_be_written_is_not_said_to_be_there(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    world = types.SimpleNamespace(rank=1, device=torch.device("cpu"))
    run = types.SimpleNamespace(folder=tmp_path, state=types.SimpleNamespace(seed=0), world=world)
    verdict = Verdict("device", (1,), "it lies")
    folder = tmp_path / "watch/step-7"
    assert evidence.write(run, 7, None, {}, verdict) == f". The evidence is in {folder}"
    monkeypatch.setattr(torch, "save", full)
    assert evidence.write(run, 7, None, {}, verdict) == f". The evidence could not be written into {folder}"
