"""Switches of `parallel`, `compute` and `train.unfreeze`: each gives the same training."""

import pytest
import torch
from safetensors.torch import save_file

from tests import own_tasks, rank_cases, runs
from tests.engine.test_strategies import STRATEGIES, settings_for
from tests.ranks import run_ranks


def without_calls(weights):
    return {name: tensor for name, tensor in weights.items() if name != "calls"}


@pytest.fixture(scope="module")
def by_hand():
    return without_calls(runs.by_hand(own_tasks.Deep())[0])


SWITCHES = {
    "resharding not": ("fsdp 2", {"parallel": {"reshard_after_forward": False}}),
    "prefetching": ("fsdp 2", {"parallel": {"forward_prefetch": 2, "backward_prefetch": 2}}),
    "cpu offload": ("fsdp 2", {"parallel": {"cpu_offload": True}}),
    "shard modules": ("fsdp 2", {"parallel": {"shard_modules": ["blocks.1", "head"]}}),
    "static graph": ("ddp 2", {"parallel": {"static_graph": True}}),
    "static graph 3": ("ddp 3", {"parallel": {"static_graph": True}}),
    "small buckets": ("ddp 2", {"parallel": {"bucket_mb": 0.0005}}),
    "no bucket views": ("ddp 2", {"parallel": {"gradient_as_bucket_view": False}}),
    "recompute": ("single", {"compute": {"activation_checkpointing": True}}),
    "recompute ddp": ("ddp 2", {"compute": {"activation_checkpointing": True}}),
    "recompute fsdp": ("fsdp 2", {"compute": {"activation_checkpointing": True}}),
    "compile blocks": ("single", {"compute": {"compile": "blocks", "compile_backend": "aot_eager"}}),
    "compile blocks fsdp": ("fsdp 2", {"compute": {"compile": "blocks", "compile_backend": "aot_eager"}}),
    "compile model": ("single", {"compute": {"compile": "model", "compile_backend": "aot_eager"}}),
    "compile model ddp": ("ddp 2", {"compute": {"compile": "model", "compile_backend": "aot_eager"}}),
    "recompute compile fsdp": ("fsdp 2", {"compute": {"compile": "blocks", "compile_backend": "aot_eager", "activation_checkpointing": True}}),
    "fused": ("single", {"optim": {"fused": True}}),
    "fused ddp": ("ddp 2", {"optim": {"fused": True}}),
    "fused fsdp": ("fsdp 2", {"optim": {"fused": True}}),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switch_gives_the_training_of_plain_torch(switch, by_hand):
    name, sections = SWITCHES[switch]
    world, parallel = STRATEGIES.get(name) or (3, {"strategy": "ddp"})
    settings = settings_for(world, parallel | sections.get("parallel", {}), 2, **{key: value for key, value in sections.items() if key != "parallel"})
    for weights, _ in run_ranks(world, rank_cases.fit_quietly, "Deep", {}, settings, timeout_s=280):
        assert runs.difference(without_calls(weights), by_hand) < 1e-10


# ---- gradual unfreezing

STAGES = [{"step": 5, "match": ["blocks.2.*", "scale"]}, {"epoch": 1.2, "match": ["blocks.*"]}]  # an epoch has 10 steps


def unfrozen_by_hand():
    torch.manual_seed(0)
    task = own_tasks.Deep()

    def trainable(model, step):
        for name, parameter in model.named_parameters():
            since = 5 if name.startswith("blocks.2.") or name == "scale" else 12 if name.startswith("blocks.") else 0
            parameter.requires_grad_(step >= since)

    return without_calls(runs.by_hand(task, before_step=trainable)[0])


@pytest.mark.parametrize("name", STRATEGIES)
def test_unfreezing_is_that_of_plain_torch_also_when_resumed_inside_a_phase(name, tmp_path):
    world, parallel = STRATEGIES[name]
    settings = settings_for(world, parallel, 2, train={"unfreeze": STAGES, "steps": 8}, checkpoint={"mode": "sync"})
    run_ranks(world, runs.fit_kind, "Deep", {}, settings, tmp_path)
    settings["train"] = settings["train"] | {"steps": 20}
    expected = unfrozen_by_hand()
    for weights, _ in run_ranks(world, runs.fit_kind, "Deep", {}, settings, tmp_path):
        assert runs.difference(without_calls(weights), expected) < 1e-10
    assert "from step 8" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resuming_inside_a_phase_is_bitwise_on_three_ranks(strategy, tmp_path):
    settings = runs.config(batch={"micro": 4}, parallel={"strategy": strategy}, train={"unfreeze": STAGES}, checkpoint={"mode": "sync"})
    once = run_ranks(3, runs.fit_kind, "Deep", {}, settings, tmp_path / "once")[0][0]
    for steps in (8, 12, 20):
        part = settings | {"train": settings["train"] | {"steps": steps}}
        weights = run_ranks(3, runs.fit_kind, "Deep", {}, part, tmp_path / "parts")[0][0]
    assert all(bool((weights[name] == once[name]).all()) for name in once)


# ---- weights to start from


@pytest.mark.parametrize("name", ["fsdp 2", "hybrid 2x2"])
def test_weights_to_start_from_are_read_by_rows(name, tmp_path):
    world, parallel = STRATEGIES[name]
    torch.manual_seed(5)
    given = own_tasks.Deep().model().state_dict()
    save_file(given, tmp_path / "model.safetensors")
    settings = settings_for(world, parallel, train={"steps": 1, "init_from": str(tmp_path)}, optim={"lr": 1e-30, "weight_decay": 0.0})
    reads = run_ranks(world, rank_cases.fit_from_file, settings)
    for weights, read in reads:
        assert all(bool(torch.isclose(weights[name], given[name], atol=1e-12).all()) for name in without_calls(given))
        assert read["blocks.0.up.weight"] < given["blocks.0.up.weight"].shape[0]
