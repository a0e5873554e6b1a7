"""How far the estimate of a training is off on this machine: the estimate of the setting that was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from lockstep.devices import peaks
from lockstep.plan.command import facts_with_or_without_data
from lockstep.plan.estimate import estimate, gathered_bytes, pass_of
from lockstep.plan.measured import Difference, Measured, differences
from lockstep.plan.model_facts import ModelFacts
from lockstep.plan.setting import PrecisionName, Setting, StrategyName, World

if TYPE_CHECKING:
    from lockstep.config import RunConfig


def calibrate(config: RunConfig, measured: Measured, utilisation: float) -> list[Difference]:
    """The estimate of the setting that was measured, beside the measurement."""
    config = config.model_copy(update={"batch": config.batch.resolve(measured.world)})
    setting = setting_of(config, measured, utilisation)
    facts = facts_with_or_without_data(
        config,
        precisions=(setting.precision,),
        device="cuda" if measured.on_gpu else "cpu",
        recompute=tuple({False, setting.recompute}),  # operations are those without recomputation
    )
    return differences(estimate(facts, setting), measured, _kept(facts, setting))


def setting_of(config: RunConfig, measured: Measured, utilisation: float) -> Setting:
    """The setting in which the training was measured. One machine has all ranks."""
    parallel = config.parallel
    world = World(
        measured.world,
        measured.world,
        peak_flops=_peaks(measured, config.compute.matmul_precision),
        utilisation=utilisation,
    )
    sheet = peaks.find(measured.device) if measured.on_gpu else None
    if sheet is not None:
        world = replace(world, link_bytes_per_second=sheet.link_gb_per_s / 2 * 1e9)
    setting = Setting(
        world,
        cast(StrategyName, measured.strategy),
        cast(PrecisionName, measured.precision),
        measured.micro_batch,
        measured.accumulate,
        recompute=measured.recompute,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
    )
    if not setting.is_sharded:
        return setting
    return replace(
        setting,
        offload=parallel.cpu_offload and measured.on_gpu,  # the memory of a CPU is that of the host
        shard_ranks=parallel.shard_ranks,
        param_dtype=parallel.param_dtype,
        reduce_dtype=parallel.reduce_dtype,
        reshard_after_forward=parallel.reshard_after_forward,
    )


def peak_flops(config: RunConfig, measured: Measured) -> float | None:
    """Most operations of the measured device in a second. None: not known."""
    return (_peaks(measured, config.compute.matmul_precision) or {}).get(measured.precision)


def _peaks(measured: Measured, matmul_precision: str | None) -> dict[str, float] | None:
    if not measured.on_gpu or peaks.find(measured.device) is None:
        return None
    fp32 = "tf32" if measured.precision == "fp32" and matmul_precision in ("high", "medium") else measured.precision
    found = peaks.flops(measured.device, fp32)
    return None if found is None else {measured.precision: found}


def _kept(facts: ModelFacts, setting: Setting) -> int | None:
    passes = pass_of(facts, setting)
    if passes is None:
        return None
    kept = passes.kept.at(setting.micro_batch)
    if not setting.is_sharded:
        return kept
    if setting.param_dtype == setting.precision:  # what is gathered needs no copies
        kept -= passes.kept_casts.at(setting.micro_batch)
    stay = (p for p in facts.parameters if p.block is None or not setting.reshard_after_forward)
    return kept + sum(gathered_bytes(p, setting) for p in stay)
