"""Measured steps: the bytes of a model that can be counted by hand, and how estimates stand beside them."""

import dataclasses
import json
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from lockstep import Task
from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep.core.errors import TrainingError
from lockstep.core.step import train_step
from lockstep.parts.flops import FlopCount
from lockstep_lab.plan.inputs import Affine, Setting
from lockstep_lab.plan.measure import EstimateDifference, Measured, _kept, compare, measure, setting_of, text
from packages.lab.tests.plan.cases import world, written_facts
from tests.ranks import run_ranks

WIDE = 256
LAST = 4 * (64 * WIDE + WIDE)  # bytes of the layer whose gradients are computed last
PARAMETERS = LAST + 4 * (WIDE * 8 + 8)  # bytes
SAMPLES = 32


class Mlp(Task):
    """A model whose bytes can be counted by hand."""

    def model(self):
        return nn.Sequential(nn.Linear(64, WIDE), nn.Tanh(), nn.Linear(WIDE, 8))

    def train_data(self):
        return TensorDataset(torch.zeros(256, 64), torch.zeros(256, 8))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


def config(ranks=1, **sections):
    """32 samples of each rank, by Adam."""
    settings = {
        "task": {"kind": f"{__file__}:Mlp"},
        "device": "cpu",
        "batch": {"global": SAMPLES * ranks},
        "optim": {"name": "AdamW"},
    }
    return config_file.parse(settings | sections)


def measure_kind(ranks, sections):
    return measure(config(ranks, **sections))


def test_bytes_of_one_rank_are_those_counted_by_hand():
    found = measure(config())
    assert (found.parameters_bytes, found.gradients_bytes) == (PARAMETERS, PARAMETERS)
    assert found.optimizer_bytes == 2 * PARAMETERS + 4 * 4  # two averages, and a counter for each of 4 tensors
    assert found.averages_bytes == 0
    batch = 4 * SAMPLES * (64 + 8)
    assert found.batch_bytes == batch
    # Tanh keeps its result, which is the input of the next layer, and the square keeps the difference.
    kept = 4 * SAMPLES * (WIDE + 8)
    assert kept <= found.activations_bytes <= kept + 4 * SAMPLES * 8 * 2
    assert found.peak_bytes >= 4 * PARAMETERS + batch
    assert found.peak_bytes <= 5 * PARAMETERS + batch + 3 * kept
    # Two operations for each weight and sample, and in the backward pass twice as many: not for the input's gradient.
    assert found.flops_per_sample == 2 * (2 * 64 * WIDE + 3 * WIDE * 8)
    assert found.step_seconds > 0
    assert (found.micro_batch, found.accumulate, found.strategy) == (SAMPLES, 1, "single")


@dataclasses.dataclass
class Samples:
    inputs: torch.Tensor
    targets: torch.Tensor


class InDataclass(Mlp):
    """Its batches are dataclasses."""

    def collate(self, samples):
        inputs, targets = zip(*samples, strict=True)
        return Samples(torch.stack(inputs), torch.stack(targets))

    def loss(self, model, batch):
        return super().loss(model, (batch.inputs, batch.targets))


def test_a_step_is_measured_again_where_another_thread_frees_memory(monkeypatch):
    """The profiler does not see what other threads free, as gloo's threads do with the inputs of collectives."""
    calls = []

    def disturbed(state, micro_batches, samples):
        calls.append(state.step)
        if len(calls) in (2, 3):
            kept = [torch.zeros(PARAMETERS)]
            other = threading.Thread(target=kept.clear)
            other.start()
            other.join()
        return train_step(state, micro_batches, samples)

    monkeypatch.setattr("lockstep.core.build.train_step", disturbed)
    measure(config())
    assert len(calls) == 2 + 2 + 3  # two are measured, two in their place, and three are timed


def test_operations_are_those_of_the_step_whose_memory_is_measured(monkeypatch):
    steps, counted = [], []

    def recorded(state, micro_batches, samples):
        steps.append(micro_batches[0].indices)
        return train_step(state, micro_batches, samples)

    count = FlopCount.count
    monkeypatch.setattr("lockstep.core.build.train_step", recorded)
    monkeypatch.setattr(FlopCount, "count", lambda self, each: (counted.append(each.indices), count(self, each))[1])
    measure(config())
    assert counted == [steps[1]]


def test_batches_in_dataclasses_are_counted():
    found = measure(config(task={"kind": f"{__file__}:InDataclass"}))
    assert found.batch_bytes == 4 * SAMPLES * (64 + 8)


def test_averages_accumulation_and_a_small_micro_batch():
    found = measure(config(batch={"global": 32, "micro": 8}, train={"ema_decay": 0.9}))
    assert found.averages_bytes == PARAMETERS
    assert (found.micro_batch, found.accumulate) == (8, 4)
    assert found.activations_bytes < 4 * SAMPLES * WIDE


@pytest.mark.cases("fsdp")
@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1), ("fsdp", 2)])
def test_two_ranks(strategy, share):
    first, second = run_ranks(2, measure_kind, 2, {"parallel": {"strategy": strategy}})
    assert second is None
    assert first.parameters_bytes == PARAMETERS // share
    assert first.gradients_bytes == PARAMETERS // share
    assert first.optimizer_bytes == pytest.approx(2 * PARAMETERS / share, rel=0.01)
    assert (first.world, first.strategy, first.micro_batch) == (2, strategy, SAMPLES)


def test_the_estimate_is_that_of_the_setting_that_was_measured():
    settings = config(batch={"global": 32, "micro": 16})
    found = measure(settings)
    rows = {row.part: row for row in compare(settings, found, 0.4)[1]}
    for part in ("parameters", "gradients", "optimizer", "all states", "operations of a sample"):
        assert rows[part].off == pytest.approx(0, abs=0.01), part
    assert rows["kept by a forward pass"].off == pytest.approx(0, abs=0.1)
    assert rows["peak"].off == pytest.approx(0, abs=0.15)
    assert rows["time of a step"].estimated is None  # the throughput of a CPU is not known


def test_weights_that_autocast_frees_after_the_forward_pass_are_not_kept():
    compute, parallel = {"activation_checkpointing": True}, {"shard_modules": ["0"]}
    settings = config(precision="bf16", compute=compute, parallel=parallel)
    rows = {row.part: row for row in compare(settings, measure(settings), 0.4)[1]}
    kept = rows["kept by a forward pass"]
    random_state = 5056  # of the CPU's generator, which a block keeps to compute again
    assert kept.measured == pytest.approx(kept.estimated + random_state, abs=100)


def test_parameters_that_stay_gathered_are_kept_and_gathered_bf16_needs_no_copies():
    facts = written_facts(blocks=2, activations=1000)
    bf16 = dataclasses.replace(facts.passes["bf16", False, None], kept_casts=Affine(300.0))
    facts = dataclasses.replace(facts, passes={**facts.passes, ("bf16", False, None): bf16})
    block, root = 4 * 800, 4 * 80
    setting = Setting(world(4), "fsdp", "fp32", 1)
    assert _kept(facts, setting) == 1000 + root
    assert _kept(facts, dataclasses.replace(setting, reshard_after_forward=False)) == 1000 + root + 2 * block
    narrow = dataclasses.replace(setting, precision="bf16", param_dtype="bf16")
    assert _kept(facts, narrow) == 500 - 300 + root / 2


@pytest.mark.exhaustive
def test_buckets_that_copy_the_gradients_are_part_of_the_peak():
    parallel = {"strategy": "ddp"}
    views, _ = run_ranks(2, measure_kind, 2, {"parallel": parallel})
    copies, _ = run_ranks(2, measure_kind, 2, {"parallel": {**parallel, "gradient_as_bucket_view": False}})
    # With views, the newest gradients are added to their views, so they exist twice for a moment.
    assert copies.peak_bytes == pytest.approx(views.peak_bytes + PARAMETERS - LAST, rel=0.001)


FOUND = Measured(
    world=2,
    device="NVIDIA H100 80GB HBM3",
    on_gpu=True,
    strategy="ddp",
    precision="bf16",
    micro_batch=8,
    accumulate=2,
    recompute=False,
    parameters_bytes=10**9,
    gradients_bytes=10**9,
    optimizer_bytes=2 * 10**9,
    averages_bytes=0,
    activations_bytes=10**9,
    batch_bytes=10**6,
    peak_bytes=6 * 10**9,
    flops_per_sample=10**12,
    step_seconds=0.05,
)


def test_a_known_gpu_gives_the_time_of_a_step_and_the_utilisation():
    settings = config(2, precision="bf16")
    setting = setting_of(settings, FOUND, 0.4)
    assert setting.world.peak_flops == {"bf16": 989.4e12}
    assert (setting.micro_batch, setting.accumulate, setting.effective_batch) == (8, 2, 32)
    rows = [EstimateDifference("peak", 5.4e9, 6e9, "bytes"), EstimateDifference("activations", None, 1e9, "bytes")]
    said = text(rows, FOUND, setting.world.peak_flops)
    assert "-10.0%" in said
    assert "buffers inside operators" in said
    near = [rows[0]._replace(estimated=5.9e9), EstimateDifference("operations of a sample", 2, 1, "flops")]
    assert "buffers inside" not in text(near, FOUND)
    assert "the measured samples were shorter" in text(near, FOUND)
    assert "not known" in said
    assert "memory by max_memory_allocated" in said
    # 16 samples of 10^12 operations in 0.05 s
    assert "320 x 10^12 operations per second, 32% of its peak: plan.utilisation=0.32" in said
    part_of_a_gpu = dataclasses.replace(FOUND, device="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert setting_of(settings, part_of_a_gpu, 0.4).world.peak_flops is None


def test_shards_of_a_part_of_the_ranks_are_estimated_as_such():
    found = dataclasses.replace(FOUND, strategy="fsdp", world=4)
    parts, all_ranks = (
        setting_of(config(4, parallel={"strategy": "fsdp", "shard_ranks": ranks}), found, 0.4) for ranks in (2, 4)
    )
    assert (parts.strategy, parts.shards, parts.replicas) == ("hybrid", 2, 2)
    assert (all_ranks.strategy, all_ranks.shards) == ("fsdp", 4)


class Overflowing(Mlp):
    """Its gradients are too large for fp16 with any scale that a few steps reach."""

    def loss(self, model, batch):
        return super().loss(model, (batch[0] + 1, batch[1])) * 1e7


def test_steps_whose_updates_are_all_skipped_are_an_error():
    with pytest.raises(TrainingError, match="gradients of 7 steps overflowed"):
        measure(config(task={"kind": f"{__file__}:Overflowing"}, precision="fp16"))


def test_command(tmp_path):
    file = tmp_path / "off.json"
    target = f"{__file__}:Mlp"
    done = CliRunner().invoke(app, ["plan", target, "device=cpu", "--measure", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "measured in real steps: 1 rank" in done.stdout
    content = json.loads(file.read_text())
    assert content["measured"]["parameters_bytes"] == PARAMETERS
    assert {row["part"] for row in content["differences"]} >= {"all states", "peak", "time of a step"}
