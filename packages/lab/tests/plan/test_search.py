"""Which options fit, and which is recommended."""

from dataclasses import replace

import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.plan.estimate import estimate
from lockstep_lab.plan.inputs import Setting
from lockstep_lab.plan.search import YEAR_SECONDS, save_interval, search
from packages.lab.tests.plan.cases import world, written_facts

FACTS = written_facts(activations=1e6, global_batch=64)  # 1 MB for each sample, beside states of 27 kB


def option(plan, name):
    return next(each for each in plan.options if each.name == name)


def test_the_largest_micro_batch_fits_and_one_sample_more_does_not():
    plan = search(FACTS, world(memory=20e6))
    found = option(plan, "ddp, fp32")
    setting = Setting(plan.world, "ddp", "fp32", found.largest_micro_batch)
    assert estimate(FACTS, setting).fits()
    assert not estimate(FACTS, replace(setting, micro_batch=found.largest_micro_batch + 1)).fits()
    assert found.largest_micro_batch == 17


def test_the_global_batch_is_cut_into_micro_batches_that_fit():
    plan = search(replace(FACTS, global_batch=400), world(memory=20e6))  # 50 samples for each GPU
    setting = option(plan, "ddp, fp32").estimate.setting
    assert (setting.micro_batch, setting.accumulate) == (17, 3)
    assert setting.effective_batch == 400


def test_nothing_is_reserved_twice():
    tight = world(memory=20e6)
    largest = [option(search(FACTS, tight, reserve=share), "ddp, fp32").largest_micro_batch for share in (0.0, 0.5)]
    assert largest == [19, 9]


def test_the_simplest_that_fits_is_recommended():
    plan = search(FACTS, world(memory=80e9))
    assert plan.recommended.name == "ddp, bf16"
    assert plan.keys == ["parallel.strategy=ddp", "precision=bf16", "batch.micro=8"]
    assert "nothing is simpler" in plan.reason


def test_states_that_are_too_large_are_sharded():
    states = 4 * sum(p.elements * 4 for p in FACTS.parameters)
    plan = search(written_facts(activations=1.0), world(memory=0.9 * states))
    assert plan.recommended.estimate.setting.strategy == "fsdp"
    assert option(plan, "ddp, fp32").fits is False
    assert "most for" in option(plan, "ddp, fp32").reason


def test_of_two_that_fit_the_faster_is_recommended():
    fast = world(peak_flops={"fp32": 1e12, "bf16": 1e13}, link_bytes_per_second=1e12)
    assert search(FACTS, fast).recommended.name == "ddp, bf16"
    old = world(peak_flops={"fp32": 1e12, "bf16": 1e12}, link_bytes_per_second=1e12)
    assert search(FACTS, old).recommended.name == "ddp, fp32"  # the same time, and the numbers stay


def test_nothing_fits_because_a_sample_is_too_large():
    plan = search(FACTS, world(memory=1e5))
    assert plan.recommended is None
    assert "A single sample is too large" in plan.reason
    assert plan.keys == []


def test_nothing_fits_because_the_states_are_too_large():
    plan = search(written_facts(activations=1.0, global_batch=8), world(memory=6000))
    assert plan.recommended is None
    assert "Use a smaller model" in plan.reason  # the root and two blocks must be gathered anyway


def test_nothing_fits_and_the_number_of_gpus_that_suffices_is_named():
    plan = search(written_facts(blocks=40, activations=1.0, global_batch=8), world(1, memory=35000))
    assert plan.recommended is None
    assert "or use more GPUs: sharded over 64 of them it fits" in plan.reason
    # A batch of 256 is cut into micro-batches on up to 128 GPUs, and whole gradients live between them.
    plan = search(written_facts(blocks=40, activations=1000.0, global_batch=256), world(1, memory=35000))
    assert "sharded over 64 of them" in plan.reason


def test_offloading_is_the_last_that_is_recommended_and_more_gpus_are_named():
    plan = search(written_facts(blocks=40, activations=1.0, global_batch=8), world(memory=35000))
    assert plan.recommended.estimate.setting.offload
    assert "Without offloading it fits on 64 GPUs" in plan.reason


def test_strategies_that_cannot_apply_are_told():
    plan = search(FACTS, world())
    assert "only one group" in option(plan, "hybrid").reason
    assert option(search(written_facts(FACTS.parameters, blocks=0), world(1)), "recompute").estimate is None
    assert {each.name for each in search(FACTS, world(1)).options} == {
        "single, fp32",
        "single + recompute, fp32",
        "single, bf16",
        "single + recompute, bf16",
    }


def test_without_a_memory_or_a_trace_nothing_is_said_to_fit():
    for plan in (search(FACTS, world(memory=None)), search(replace(FACTS, passes={}), world())):
        assert {each.fits for each in plan.options if each.estimate} == {None}
        assert plan.recommended is not None
        assert "known" in plan.reason


def test_a_precision_without_a_trace_is_not_said_to_fit_beside_one_that_does():
    fp32 = {key: passes for key, passes in FACTS.passes.items() if key[0] == "fp32"}
    plan = search(replace(FACTS, passes=fp32), world())
    assert (option(plan, "ddp, fp32").fits, option(plan, "ddp, bf16").fits) == (True, None)
    assert plan.recommended.name == "ddp, fp32"
    memory = option(plan, "ddp, bf16").estimate.memory
    assert memory.activations_bytes is None
    assert memory.at_peak["gradients"] == memory.gradients_bytes


def test_intervals_of_saving():
    month = YEAR_SECONDS / 12
    young = (2 * 60 * month) ** 0.5
    assert save_interval(60, 12 / 100, 100) == pytest.approx(young, rel=0.01)
    assert save_interval(3 * month, 12, 1) == pytest.approx(month)  # saving takes longer than a failure is away
    with pytest.raises(UsageError, match="above 0"):
        save_interval(0, 1, 8)
    with pytest.raises(UsageError, match="finite"):
        save_interval(3, float("nan"), 8)


def test_the_interval_of_saving_is_the_best_one():
    """Daly's expected time (equation 20): M * exp(R / M) * (exp((t + d) / M) - 1) * W / t, least at the interval."""
    from math import exp

    between, save = 3600.0, 120.0

    def cost(interval):
        return between * (exp((interval + save) / between) - 1) / interval

    best = min(range(60, 3600), key=cost)
    assert save_interval(save, YEAR_SECONDS / between, 1) == pytest.approx(best, rel=0.01)


def test_the_configs_own_choices_count():
    wide, narrow = (search(FACTS, world(), details={"param_dtype": dtype}) for dtype in (None, "bf16"))
    gathered = [option(plan, "fsdp, bf16").estimate.communication.sent_bytes["all_gather"] for plan in (wide, narrow)]
    assert gathered[0] == 2 * gathered[1]
    halves = search(FACTS, world(), details={"shard_ranks": 4})
    assert option(halves, "hybrid, fp32").estimate.setting.replicas == 2
    assert option(halves, "fsdp, fp32").estimate.setting.shards == 8
