"""Switches of `parallel`, `compute` and `train.unfreeze`: each gives the same training."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task
from lockstep.core.checkpoint import files, store
from tests import own_tasks, rank_cases, runs
from tests.core.test_strategies import STEPS, STRATEGIES, settings_for
from tests.ranks import run_ranks
from tests.selection import mainly


def without_calls(weights):
    return {name: tensor for name, tensor in weights.items() if name != "calls"}


@pytest.fixture(scope="module")
def by_hand():
    return without_calls(runs.by_hand(own_tasks.Deep(), STEPS)[0])


SWITCHES = {
    "resharding not": ("fsdp 2", {"parallel": {"reshard_after_forward": False}}),
    "prefetching": ("fsdp 2", {"parallel": {"forward_prefetch": 2, "backward_prefetch": 2}}),
    "reduce each micro-batch": ("fsdp 2", {"parallel": {"reduce_each_micro_batch": True}}),
    "reduce each micro-batch hybrid": ("hybrid 2x2", {"parallel": {"reduce_each_micro_batch": True}}),
    "cpu offload": ("fsdp 2", {"parallel": {"cpu_offload": True}}),
    "shard modules": ("fsdp 2", {"parallel": {"shard_modules": ["blocks.1", "head"]}}),
    "static graph": ("ddp 2", {"parallel": {"static_graph": True}}),
    "static graph 3": ("ddp 3", {"parallel": {"static_graph": True}}),
    "small buckets": ("ddp 2", {"parallel": {"bucket_mb": 0.0005}}),
    "no bucket views": ("ddp 2", {"parallel": {"gradient_as_bucket_view": False}}),
    "recompute": ("single", {"compute": {"activation_checkpointing": True}}),
    "recompute ddp": ("ddp 2", {"compute": {"activation_checkpointing": True}}),
    "selective": ("fsdp 2", {"compute": {"activation_checkpointing": "selective", "recompute_every_blocks": 2}}),
    "selective compile": (
        "single",
        {"compute": {"compile": "blocks", "compile_backend": "aot_eager", "activation_checkpointing": "selective"}},
    ),
    "recompute fsdp": ("fsdp 2", {"compute": {"activation_checkpointing": True}}),
    "compile blocks": ("single", {"compute": {"compile": "blocks", "compile_backend": "aot_eager"}}),
    "compile blocks fsdp": ("fsdp 2", {"compute": {"compile": "blocks", "compile_backend": "aot_eager"}}),
    "compile model": ("single", {"compute": {"compile": "model", "compile_backend": "aot_eager"}}),
    "compile model ddp": ("ddp 2", {"compute": {"compile": "model", "compile_backend": "aot_eager"}}),
    "recompute compile fsdp": (
        "fsdp 2",
        {"compute": {"compile": "blocks", "compile_backend": "aot_eager", "activation_checkpointing": True}},
    ),
    "fused": ("single", {"optim": {"fused": True}}),
    "fused ddp": ("ddp 2", {"optim": {"fused": True}}),
    "fused fsdp": ("fsdp 2", {"optim": {"fused": True}}),
}


OTHERS_COVER = (
    "selective",
    "shard modules",
    "fused fsdp",
    "static graph",
    "small buckets",
    "selective compile",
    "compile blocks fsdp",
    "reduce each micro-batch",
    "static graph 3",
    "recompute ddp",
    "recompute fsdp",
    "recompute compile fsdp",
    "compile blocks",
    "compile model ddp",
    "fused ddp",
    "prefetching",
    "resharding not",
    "no bucket views",
    "recompute",
    "compile model",
    "fused",
)


@pytest.mark.parametrize(
    "switch", [pytest.param(name, marks=pytest.mark.exhaustive if name in OTHERS_COVER else ()) for name in SWITCHES]
)
def test_switch_gives_the_training_of_plain_torch(switch, by_hand, tmp_path):
    name, sections = SWITCHES[switch]
    world, parallel = STRATEGIES.get(name) or (3, {"strategy": "ddp"})
    others = {key: value for key, value in sections.items() if key != "parallel"}
    settings = settings_for(world, parallel | sections.get("parallel", {}), 2, train={"steps": STEPS}, **others)
    for weights, _ in run_ranks(world, rank_cases.fit_quietly, "Deep", {}, settings, tmp_path):
        assert runs.difference(without_calls(weights), by_hand) < 1e-10


# ---- precision


@pytest.mark.parametrize("precision", mainly(["fp16"], ["bf16", "fp16"]))
def test_lower_precision_is_the_same_with_every_strategy(precision):
    """Two micro-batches of 12, whoever computes them."""
    settings = runs.config(
        precision=precision,
        batch={"micro": 12},
        train={"steps": 10},
        optim={"name": "SGD", "weight_decay": 0.0, "clip_norm": 1.0},
    )
    alone, results = runs.fit_kind("Deep", {"dtype": torch.float32}, settings)
    full, _ = runs.fit_kind("Deep", {"dtype": torch.float32}, settings | {"precision": "fp32"})
    assert 1e-5 < runs.difference(without_calls(alone), without_calls(full)) < 0.05
    for strategy in ("ddp", "fsdp"):
        found = run_ranks(2, rank_cases.dtypes_seen, settings | {"parallel": {"strategy": strategy}})
        for weights, logged, seen in found:
            assert runs.difference(without_calls(weights), without_calls(alone)) < 1e-5
            assert logged["train/grad_norm"] == pytest.approx(results["train/grad_norm"], rel=1e-5)
            assert logged["train/skipped"] == results["train/skipped"]
            assert weights["head.weight"].dtype == torch.float32
            half = "torch.bfloat16" if precision == "bf16" else "torch.float16"
            assert seen == {("torch.float32", half, "torch.float32")}


@pytest.mark.exhaustive
def test_parameters_may_be_gathered_in_fewer_bits_than_they_are_kept_in():
    settings = runs.config(
        precision="bf16", batch={"micro": 4}, train={"steps": 10}, optim={"name": "SGD", "weight_decay": 0.0}
    )
    whole, _ = runs.fit_kind("Deep", {"dtype": torch.float32}, settings)
    settings["parallel"] = {"strategy": "fsdp", "param_dtype": "bf16"}
    for weights, _, seen in run_ranks(2, rank_cases.dtypes_seen, settings):
        assert weights["head.weight"].dtype == torch.float32
        assert seen == {("torch.bfloat16", "torch.bfloat16", "torch.float32")}
        assert 1e-6 < runs.difference(without_calls(weights), without_calls(whole)) < 0.05


@pytest.mark.parametrize("name", mainly(["ddp 2", "fsdp 2"], ["ddp 2", "fsdp 2", "hybrid 2x2"]))
def test_overflow_on_one_shard_skips_the_update_on_all(tmp_path, name):
    world, parallel = STRATEGIES[name]
    settings = settings_for(
        world, parallel, precision="fp16", train={"steps": 2}, log={"every_steps": 1}, checkpoint={"every_steps": 1}
    )
    (before, *_) = run_ranks(world, rank_cases.overflow_of_one_row, settings, tmp_path)
    results = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert results["train/skipped"] == 1
    assert results["train/loss_scale"] == 65536 / 2
    (_, first) = store.listed(tmp_path / "checkpoints")
    weights = dict(files.read(first.path, first.index))
    assert all(bool((weights[f"model.{key}"] == before[key]).all()) for key in without_calls(before))


# ---- images


class Images(Task):
    def __init__(self):
        self.formats = set()

    def model(self):
        self.built = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2)
        ).double()
        return self.built

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(240, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.zeros(240, 2, dtype=torch.float64),
        )

    def loss(self, model, batch):
        self.formats |= {
            tensor.is_contiguous(memory_format=torch.channels_last)
            for tensor in (batch[0], model[0].weight, model[0](batch[0]))
        }
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


def test_channels_last_reaches_images_weights_and_activations():
    expected, _ = runs.fit(Images(), runs.config())
    task = Images()
    weights, _ = runs.fit(task, runs.config(compute={"channels_last": True}))
    assert task.formats == {True}
    assert runs.difference(weights, expected) < 1e-10


# ---- gradual unfreezing

STAGES = [{"step": 5, "match": ["blocks.2.*", "scale"]}, {"epoch": 1.2, "match": ["blocks.*"]}]  # an epoch has 10 steps


def unfrozen_by_hand():
    torch.manual_seed(0)
    task = own_tasks.Deep()

    def trainable(model, step):
        for name, parameter in model.named_parameters():
            since = 5 if name.startswith("blocks.2.") or name == "scale" else 12 if name.startswith("blocks.") else 0
            parameter.requires_grad_(step >= since)

    return without_calls(runs.by_hand(task, 14, before_step=trainable)[0])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name != "fsdp 3" else ()) for name in STRATEGIES],
)
def test_unfreezing_is_that_of_plain_torch_also_when_resumed_inside_a_phase(name, tmp_path):
    world, parallel = STRATEGIES[name]
    settings = settings_for(world, parallel, 2, train={"unfreeze": STAGES, "steps": 8}, checkpoint={"mode": "sync"})
    run_ranks(world, runs.fit_kind, "Deep", {}, settings, tmp_path)
    settings["train"] = settings["train"] | {"steps": 14}
    expected = unfrozen_by_hand()
    for weights, _ in run_ranks(world, runs.fit_kind, "Deep", {}, settings, tmp_path):
        assert runs.difference(without_calls(weights), expected) < 1e-10
    log = (tmp_path / "train.log").read_text()
    assert "from step 8" in log
    model = own_tasks.Deep().model()
    count = sum(parameter.numel() for parameter in model.parameters())
    last = sum(parameter.numel() for parameter in model.blocks[2].parameters()) + model.scale.numel()
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    first, second = (line.partition("  ")[2] for line in log.splitlines() if "more parameters train" in line)
    frozen = count - blocks - model.scale.numel()
    assert first.startswith(f"from step 6 on, {last:,} more parameters train ({', '.join(STAGES[0]['match'])}): ")
    assert f"{last:,} of group default at learning rate 0.01; {frozen + last:,} of {count:,} parameters train" in first
    assert second.startswith("from step 13 on, ")
    assert second.endswith(f"; {count:,} of {count:,} parameters train now")


@pytest.mark.exhaustive  # the test above resumes inside a phase, too
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resuming_inside_a_phase_is_bitwise_on_three_ranks(strategy, tmp_path):
    settings = runs.config(
        batch={"micro": 8},
        parallel={"strategy": strategy},
        train={"unfreeze": STAGES, "steps": 13},
        checkpoint={"mode": "sync"},
    )
    once = run_ranks(3, runs.fit_kind, "Deep", {}, settings, tmp_path / "once")[0][0]
    for steps in (8, 13):
        part = settings | {"train": settings["train"] | {"steps": steps}}
        weights = run_ranks(3, runs.fit_kind, "Deep", {}, part, tmp_path / "parts")[0][0]
    assert all(bool((weights[name] == once[name]).all()) for name in once)


# ---- weights to start from


@pytest.mark.parametrize("name", mainly(["fsdp 2"], ["fsdp 2", "hybrid 2x2"]))
def test_weights_to_start_from_are_read_by_rows(name, tmp_path):
    world, parallel = STRATEGIES[name]
    torch.manual_seed(5)
    given = own_tasks.Deep().model().state_dict()
    save_file(given, tmp_path / "model.safetensors")
    settings = settings_for(
        world, parallel, train={"steps": 1, "init_from": str(tmp_path)}, optim={"lr": 1e-30, "weight_decay": 0.0}
    )
    reads = run_ranks(world, rank_cases.fit_from_file, settings)
    for weights, read in reads:
        assert all(bool(torch.isclose(weights[name], given[name], atol=1e-12).all()) for name in without_calls(given))
        assert read["blocks.0.up.weight"] < given["blocks.0.up.weight"].shape[0]
