"""Models that are cut across ranks: weights, norms, logs and evaluations are those of one process in plain torch."""

import functools
import itertools
import shutil

import pytest
import torch
from safetensors.torch import load_file

from lockstep.core.checkpoint import files, store
from tests import runs
from tests.mesh import mesh_cases
from tests.ranks import run_ranks
from tests.selection import mainly

# Ranks and `parallel` section; replicate x shard x tensor.
MESHES = {
    "1x1x2": (2, {"tensor": 2}),
    "1x2x2": (4, {"strategy": "fsdp", "tensor": 2}),
    "2x1x2": (4, {"strategy": "ddp", "tensor": 2}),
    "1x1x4": (4, {"strategy": "fsdp", "tensor": 4}),
    "2x2x2": (8, {"strategy": "fsdp", "tensor": 2, "shard_ranks": 2}),
    "each micro-batch": (4, {"strategy": "fsdp", "tensor": 2, "reduce_each_micro_batch": True}),
}
OTHERS = {"single": (1, {}), "ddp 2": (2, {}), "fsdp 3": (3, {"strategy": "fsdp"})}
OPTIONS = {"eval_length": 10}


def without_calls(weights):
    return {name: tensor for name, tensor in weights.items() if name != "calls"}


def sections(name, accumulate=1, **more):
    world, parallel = (MESHES | OTHERS)[name]
    micro = -(-24 // (world // parallel.get("tensor", 1) * accumulate))
    return {"batch": {"micro": micro}, "parallel": parallel} | more


@functools.cache
def by_hand(steps, clip_norm):
    """Weights and norms in plain torch."""
    return runs.by_hand(mesh_cases.Cut(), steps, clip_norm=clip_norm)


KEPT = [("1x2x2", 2, 0.5, "PLAN", 4)]  # BY_TOKENS: a language model of test_recipes.py
CASES = itertools.product(MESHES, (1, 2, 3), (None, 0.5), ("PLAN", "BY_TOKENS"), (20,))


@pytest.mark.parametrize(("name", "accumulate", "clip_norm", "plan", "steps"), mainly(KEPT, [*KEPT, *CASES]))
def test_weights_and_norms_are_those_of_plain_torch(name, accumulate, clip_norm, plan, steps):
    weights, norms = by_hand(steps, clip_norm)
    given = sections(name, accumulate, optim={"clip_norm": clip_norm}, train={"steps": steps})
    answers = run_ranks(MESHES[name][0], mesh_cases.fit, given, {"plan": getattr(mesh_cases, plan)})
    for found, results in answers:
        assert found.pop("calls") == steps * accumulate
        assert runs.difference(found, without_calls(weights)) < 1e-10
        assert results["train/grad_norm"] == pytest.approx(norms[-1], rel=1e-10)
    assert all(torch.equal(found[key], answers[0][0][key]) for found, _ in answers for key in found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["1x1x2", "1x2x2", "2x1x2", "1x1x4", "2x2x2"])
def test_logs_averages_and_evaluations_are_those_of_one_process(name):
    """24 samples, of which a group with an odd number of micro-batches has a filler; 25 in the evaluation."""
    train = {"steps": 6, "eval_every_steps": 3, "ema_decay": 0.7}
    more = {"train": train, "log": {"every_steps": 2, "train_metrics": True, "flops": True}}
    options = {"eval_length": 25}
    (alone,) = run_ranks(1, mesh_cases.fit, sections("single", 3, **more), options, None, "Measured")
    for found, results in run_ranks(
        MESHES[name][0], mesh_cases.fit, sections(name, 2, **more), options, None, "Measured"
    ):
        assert runs.difference(without_calls(found), without_calls(alone[0])) < 1e-10
        for key in ("train/loss", "eval/loss", "eval/samples", "eval/error", "train/error"):
            assert results[key] == pytest.approx(alone[1][key], rel=1e-10), key


@pytest.mark.exhaustive
def test_ranks_of_a_group_hold_the_same_bits_of_what_is_not_cut_and_parts_of_what_is():
    """Dropout draws the same for the whole group, and another mask in each group."""
    answers = run_ranks(4, mesh_cases.parts_after_training, sections("1x2x2", 2), {"dropout": 0.5})
    shapes = dict(mesh_cases.Cut().model().named_parameters())
    for name, whole in shapes.items():
        parts = [answer["parts"][name] for answer in answers]
        is_cut = name.split(".")[2:3] != [] and name.split(".")[2] in ("q", "k", "v", "mix", "up", "down")
        if is_cut and not name.endswith(("mix.bias", "down.bias")):
            assert sum(part.numel() for part in parts) == whole.numel()
        else:
            assert torch.equal(parts[0], parts[1])
            assert torch.equal(parts[2], parts[3])
            assert parts[0].numel() + parts[2].numel() == whole.numel()
    drawn = [answer["drawn"] for answer in answers]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    indices = [answer["indices"] for answer in answers]
    assert indices[0] == indices[1]
    assert sorted(indices[0] + indices[2]) == sorted({*indices[0], *indices[2]})


# ---- checkpoints

WAYS = [("1x2x2", "single"), ("fsdp 3", "2x1x2")]
EVERY = [*MESHES, *OTHERS]
# A checkpoint holds whole rows, so what is read does not depend on who wrote: out of each, into each, and in a ring.
RING = list(zip(EVERY, [*EVERY[1:], EVERY[0]], strict=True))
EACH = [*WAYS, *RING, *((name, "single") for name in MESHES), *(("single", name) for name in MESHES)]


def saved_by(name, folder, steps, saved=None, **more):
    train = {"steps": steps, "ema_decay": 0.7, "eval_every_steps": steps}
    given = sections(name, train=train, checkpoint={"mode": "sync", "every_steps": saved or steps}, **more)
    return run_ranks((MESHES | OTHERS)[name][0], mesh_cases.fit, given, OPTIONS, folder)


LONG = [(first, then, 12) for first, then in dict.fromkeys(EACH)]
"""An epoch ends after the tenth step."""


@pytest.mark.parametrize(("first", "then", "steps"), mainly([(*WAYS[0], 4)], [(*WAYS[0], 4), *LONG]))
def test_a_checkpoint_goes_on_anywhere(first, then, steps, tmp_path):
    undisturbed, _ = by_hand(steps, None)
    saved_by(first, tmp_path / "run", steps // 2)
    for weights, results in saved_by(then, tmp_path / "run", steps):
        assert results["step"] == steps
        assert weights.pop("calls") == steps
        assert runs.difference(weights, without_calls(undisturbed)) < 1e-10
    assert f"from step {steps // 2}" in (tmp_path / "run" / "train.log").read_text()
    assert store.check(store.listed(tmp_path / "run" / "checkpoints")[0]) == []


@pytest.mark.exhaustive  # a checkpoint goes on above
@pytest.mark.parametrize("name", ["1x1x2", "1x2x2"])
def test_a_run_that_goes_on_ends_bit_for_bit_as_one_that_does_not_stop(name, tmp_path):
    def state(folder):
        newest = store.listed(folder / "checkpoints")[0]
        return dict(files.read(newest.path, newest.index))

    saved_by(name, tmp_path / "one", 4, 2, optim={"clip_norm": 0.5})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(store.listed(tmp_path / "two" / "checkpoints")[0].path)  # as if the run had stopped at step 2
    saved_by(name, tmp_path / "two", 4, 2, optim={"clip_norm": 0.5})
    assert "from step 2" in (tmp_path / "two" / "train.log").read_text()
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# ---- what else joins a training

UNFREEZE = [{"step": 3, "match": ["blocks.*"]}]
JOINED = {
    "unfreezing": {"train": {"steps": 6, "unfreeze": UNFREEZE}},
    "recomputation": {"train": {"steps": 3}, "compute": {"activation_checkpointing": True}},
    "biases alone": {"train": {"steps": 3}, "optim": {"clip_norm": 0.1}},
    "rates by depth": {"train": {"steps": 3}, "optim": {"layer_decay": 0.5}},
}


BUT_BIASES = ("inner", "head", "blocks.1", *(f"blocks.0.{name}" for name in ("norm", "of_head", "q", "k", "v", "up")))
BUT_BIASES += ("blocks.0.mix.weight", "blocks.0.down.weight")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", JOINED)
def test_what_joins_a_training_does_so_on_a_mesh(name):
    """Of the biases of `rowwise` layers, each rank has a copy: the norm counts one."""
    options = {"frozen": BUT_BIASES} if name == "biases alone" else {}
    (alone,) = run_ranks(1, mesh_cases.fit, sections("single", 3, **JOINED[name]), options)
    answers = run_ranks(4, mesh_cases.fit, sections("1x2x2", 2, **JOINED[name]), options)
    for weights, _ in answers:
        assert runs.difference(without_calls(weights), without_calls(alone[0])) < 1e-12
        assert all(torch.equal(weights[key], answers[0][0][key]) for key in weights)


@pytest.mark.exhaustive
def test_weights_of_a_run_on_a_mesh_begin_another_and_are_exported_and_evaluated(tmp_path):
    saved_by("1x2x2", tmp_path / "run", 3)
    answers = run_ranks(
        4, mesh_cases.export_and_evaluate, tmp_path / "run", sections("1x2x2"), OPTIONS, tmp_path / "many"
    )
    ((loss, samples, outputs),) = run_ranks(
        1, mesh_cases.export_and_evaluate, tmp_path / "run", sections("single"), OPTIONS, tmp_path / "alone"
    )
    for found_loss, found_samples, _ in answers:
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert found_samples == samples == 10
    assert torch.allclose(answers[0][2], outputs, rtol=0, atol=1e-12)
    many, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("many", "alone"))
    assert many.keys() == alone.keys()
    assert all(torch.equal(many[name], alone[name]) for name in alone)
    begun = {"train": {"steps": 1, "init_from": str(tmp_path / "run")}}
    (one,) = run_ranks(1, mesh_cases.fit, sections("single", **begun))
    for weights, _ in run_ranks(4, mesh_cases.fit, sections("1x2x2", **begun)):
        assert runs.difference(without_calls(weights), without_calls(one[0])) < 1e-10
