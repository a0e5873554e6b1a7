"""A search for the settings that fit, each with its largest micro-batch, and for the one to recommend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.core.errors import UsageError, number_of
from lockstep_lab.plan.estimate import Estimate, estimate, pass_of
from lockstep_lab.plan.inputs import Machines, ModelFacts, PrecisionName, Setting, StrategyName

LARGEST = 1 << 16
"""Samples of the largest micro-batch that is tried."""
_MOST_GPUS = 1 << 14
_STRATEGIES: tuple[tuple[StrategyName, bool], ...] = (
    ("single", False),
    ("ddp", False),
    ("fsdp", False),
    ("hybrid", False),
    ("fsdp", True),
    ("hybrid", True),
)
YEAR_SECONDS = 365.25 * 86400


@dataclass(frozen=True)
class Option:
    """A strategy with a precision, at the largest micro-batch that fits and that the global batch can use."""

    name: str
    """Such as `fsdp + offload, bf16`."""
    estimate: Estimate | None
    """At the largest micro-batch that fits; at a micro-batch of 1 if none fits. None: the option cannot apply."""
    fits: bool | None
    """None: unknown, because the GPU's memory or the activations are."""
    largest_micro_batch: int | None
    """The largest micro-batch that fits without accumulation, whatever the global batch. None: not even one sample
    fits, or it is unknown."""
    reason: str = ""
    """Why it cannot apply, or does not fit."""


@dataclass(frozen=True)
class PlanResult:
    """The answer of `lockstep plan`."""

    facts: ModelFacts
    world: Machines
    options: list[Option]
    recommended: Option | None
    reason: str
    """Why this option is recommended; or what to change first, if nothing fits."""
    keys: list[str]
    """Overrides of the config for the recommended option, such as `parallel.strategy=fsdp`."""
    reserve: float = 0.1
    """Fraction of the memory that stays free."""
    save_every_seconds: float | None = None
    """By Young and Daly; None without a failure rate."""


def search(
    facts: ModelFacts,
    world: Machines,
    *,
    precisions: tuple[PrecisionName, ...] = ("fp32", "bf16"),
    reserve: float = 0.1,
    details: Mapping[str, Any] | None = None,
) -> PlanResult:
    """All options in this world, each with the largest micro-batch that fits, and a recommendation.

    Args:
        details: further fields of all settings, such as `param_dtype`, from the config.
        reserve: fraction of the memory that stays free, for the driver, library buffers and fragmentation.
    """
    options = [_option(facts, setting, reserve) for setting in _settings(facts, world, precisions, details or {})]
    of_mesh = {name: value for name, value in (details or {}).items() if name in ("tensor", "virtual_ranks")}
    options += list(_not_applicable(facts, world, of_mesh, precisions[0]))
    fitting = [option for option in options if option.fits]
    unknown = [option for option in options if option.fits is None and option.estimate is not None]
    if fitting:
        recommended = min(fitting, key=_cost)
        why = _why(facts, recommended, fitting, reserve)
        return PlanResult(facts, world, options, recommended, why, keys_of(recommended), reserve)
    if unknown:
        recommended = min(unknown, key=lambda option: (_peak(option), _cost(option)))
        why = f"{recommended.name} needs the least memory for its states; "
        why += "activations are unknown" if world.memory_bytes else "the memory of a GPU is unknown"
        return PlanResult(facts, world, options, recommended, why, keys_of(recommended), reserve)
    return PlanResult(facts, world, options, None, _what_first(facts, options, world, reserve), [], reserve)


def save_interval(save_seconds: float, failures_per_gpu_year: float, gpus: int) -> float:
    """Seconds of training between two checkpoints that minimise lost time.

    The first-order optimum sqrt(2 * save * M), where M is the mean time between failures of the whole training, is
    Young's (1974, doi:10.1145/361147.361115). The further terms are Daly's (2006, doi:10.1016/j.future.2004.11.016,
    equation 37): sqrt(2 * save * M) * (1 + sqrt(save / (2 * M)) / 3 + save / (18 * M)) - save, for save < 2 * M, and M
    otherwise.

    Args:
        save_seconds: seconds that training pauses for each checkpoint.
        failures_per_gpu_year: failures of a GPU, or of what it needs, in a year.

    Raises:
        UsageError: an argument is not positive, or not finite.
    """
    if not (0 < save_seconds < math.inf and 0 < failures_per_gpu_year < math.inf):
        where = "plan.save_seconds, plan.failures_per_gpu_year"
        raise UsageError("must be finite and above 0", where=where, remedy="give a number such as 30, and 0.5")
    between = YEAR_SECONDS / (failures_per_gpu_year * gpus)
    if save_seconds >= 2 * between:
        return between
    ratio = save_seconds / (2 * between)
    return math.sqrt(2 * save_seconds * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


# ---- the options


def _settings(
    facts: ModelFacts, world: Machines, precisions: tuple[PrecisionName, ...], details: Mapping[str, Any]
) -> Iterator[Setting]:
    for strategy, offload in _STRATEGIES[1:] if world.gpus > 1 else _STRATEGIES[:1]:
        for precision in precisions:
            for recompute in (False, True):
                if recompute and not facts.blocks:
                    continue
                try:
                    setting = Setting(world, strategy, precision, 1, offload=offload, recompute=recompute, **details)
                    estimate(facts, setting)
                except UsageError:
                    continue
                yield setting


def _not_applicable(
    facts: ModelFacts, world: Machines, of_mesh: Mapping[str, Any], precision: PrecisionName
) -> Iterator[Option]:
    """The strategies that cannot apply, each with the reason."""
    for strategy, _ in _STRATEGIES[1:4] if world.gpus > 1 else ():
        try:
            estimate(facts, Setting(world, strategy, precision, 1, **of_mesh))
        except UsageError as error:
            yield Option(strategy, None, False, None, reason=error.what)
    if not facts.blocks:
        yield Option("recompute", None, False, None, reason="the model has no repeated blocks")


def at_micro_batch(facts: ModelFacts, setting: Setting, micro_batch: int) -> Setting:
    """`setting` with at most this micro-batch, and the accumulation that the global batch needs."""
    of_part = -(-facts.global_batch // setting.parts)
    passes = -(-of_part // min(micro_batch, of_part))
    return replace(
        setting,
        micro_batch=-(-of_part // passes),
        accumulate=passes * -(-setting.parts // setting.data_ranks),
        global_batch=facts.global_batch,
    )


def _option(facts: ModelFacts, setting: Setting, reserve: float) -> Option:
    of_part = -(-facts.global_batch // setting.parts)

    def fits(tried: Setting) -> bool | None:
        return estimate(facts, tried).fits(reserve)

    if setting.world.memory_bytes is None or pass_of(facts, setting) is None:
        found = estimate(facts, at_micro_batch(facts, setting, of_part))
        return Option(setting.name, found, found.fits(reserve), None, _shortage(found, reserve))
    largest = _largest(1, LARGEST, lambda n: fits(replace(setting, micro_batch=n)))
    if largest >= of_part and not setting.virtual_ranks:
        return Option(setting.name, estimate(facts, at_micro_batch(facts, setting, of_part)), True, largest)
    # With accumulation, more is alive: gradients are kept between micro-batches.
    smaller = _largest(
        1, max(1, of_part - (not setting.virtual_ranks)), lambda n: fits(at_micro_batch(facts, setting, n))
    )
    if smaller:
        return Option(setting.name, estimate(facts, at_micro_batch(facts, setting, smaller)), True, largest or None)
    found = estimate(facts, at_micro_batch(facts, setting, 1))
    reason = _shortage(found, reserve)
    if largest:
        reason += f"; without accumulation, {number_of(largest, 'sample')} per GPU would fit: a global batch of "
        reason += f"{largest * setting.data_ranks}"
    return Option(setting.name, found, False, largest or None, reason)


def _largest(low: int, high: int, fits: Callable[[int], bool | None]) -> int:
    """The largest number from `low` to `high` that fits, given that smaller numbers also fit; 0 if none does."""
    if not fits(low):
        return 0
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shortage(found: Estimate, reserve: float) -> str:
    limit = found.setting.world.memory_bytes
    if limit is None or found.fits(reserve) is not False:
        return ""
    part = max(found.memory.at_peak, key=found.memory.at_peak.__getitem__)
    return (
        f"needs {gigabytes(found.memory.peak_bytes)} of {gigabytes(limit * (1 - reserve))}, most for {part}: "
        f"{gigabytes(found.memory.at_peak[part])}"
    )


def gigabytes(count: float) -> str:
    """Bytes as text, in 10^9 or 10^6 bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# ---- the recommendation


def _simplicity(setting: Setting) -> int:
    return {"single": 0, "ddp": 0, "fsdp": 2, "hybrid": 3}[setting.strategy] + setting.recompute + 8 * setting.offload


def _cost(option: Option) -> tuple[float, ...]:
    """Options with less cost are recommended: less time, if known; then fewer passes; then simpler."""
    found = option.estimate
    assert found is not None
    setting = found.setting
    narrow = float(setting.precision != "fp32")  # changes the results
    if found.step_seconds is None:  # GPUs compute faster in 16 bits
        return (float(setting.offload), -narrow, float(_simplicity(setting)), float(setting.accumulate))
    seconds = round(math.log(max(found.step_seconds, 1e-9)) / 0.05)  # differences below 5 % do not count
    # Offloading moves all states through the host in each step, and its time is not modelled.
    return (float(setting.offload), seconds, float(_simplicity(setting)), float(setting.accumulate), narrow)


def _peak(option: Option) -> int:
    assert option.estimate is not None
    return option.estimate.memory.peak_bytes


def _why(facts: ModelFacts, best: Option, fitting: list[Option], reserve: float) -> str:
    found = best.estimate
    assert found is not None
    limit = found.setting.world.memory_bytes or 0
    text = f"{best.name} needs {gigabytes(found.memory.peak_bytes)} of {gigabytes(limit)}"
    text += f" at a micro-batch of {found.setting.micro_batch}"
    simpler = [o for o in fitting if o.estimate and _simplicity(o.estimate.setting) < _simplicity(found.setting)]
    if found.step_seconds is not None:
        text += f", and its step of {found.step_seconds:.3g} s is the shortest of those that fit"
        text += ", within 5 %, and it is the simplest of these" if not simpler else ""
    elif not simpler:
        text += "; nothing simpler fits" if _simplicity(found.setting) else "; nothing is simpler"
    gpus = _gpus_needed(facts, found.setting, reserve) if found.setting.offload else None
    return text + (f". Without offloading it fits on {gpus} GPUs" if gpus else "")


def keys_of(option: Option) -> list[str]:
    """The overrides of a config that ask for an option."""
    found = option.estimate
    assert found is not None
    setting = found.setting
    keys = [f"parallel.strategy={'fsdp' if setting.strategy == 'hybrid' else setting.strategy}"]
    keys += [f"parallel.tensor={setting.tensor}"] if setting.tensor > 1 else []
    if setting.strategy == "hybrid":
        keys.append(f"parallel.shard_ranks={setting.shards}")
    if setting.offload:
        keys.append("parallel.cpu_offload=true")
    if setting.recompute:
        keys.append("compute.activation_checkpointing=true")
    return [*keys, f"precision={setting.precision}", f"batch.micro={setting.micro_batch}"]


def _what_first(facts: ModelFacts, options: list[Option], world: Machines, reserve: float) -> str:
    """Nothing fits: what to change first."""
    possible = [option for option in options if option.estimate is not None]
    if not possible:
        return "no strategy can apply: " + "; ".join(option.reason for option in options)
    least = min(possible, key=_peak)
    assert least.estimate is not None
    memory = least.estimate.memory
    text = f"nothing fits. {least.name} comes nearest: {least.reason}. "
    part = max(memory.at_peak, key=memory.at_peak.__getitem__)
    gpus = _gpus_needed(facts, least.estimate.setting, reserve)
    more = f"; or use more GPUs: sharded over {gpus} of them it fits" if gpus else ""
    if part == "activations":
        return text + (
            "A single sample is too large: make samples smaller first (task.image_size, task.max_length, slices), "
            f"or use a GPU with more memory{more}"
        )
    accumulating = [o for o in possible if o.largest_micro_batch and o.estimate and o.estimate.setting.is_sharded]
    if accumulating:
        option = max(accumulating, key=lambda o: o.largest_micro_batch or 0)
        size = (option.largest_micro_batch or 1) * least.estimate.setting.data_ranks
        return text + f"Change batch.global first: {option.name} fits with {size}, which needs no accumulation{more}"
    return text + f"Use a smaller model, or GPUs with more memory{more}"


def _gpus_needed(facts: ModelFacts, setting: Setting, reserve: float) -> int | None:
    """The smallest power of two of GPUs on which the training fits, sharded over all with the same global batch. None:
    there is none."""
    world = setting.world
    gpus = max(2, 1 << world.gpus.bit_length())
    while gpus <= _MOST_GPUS:
        larger = replace(world, gpus=gpus, gpus_per_node=min(world.gpus_per_node, gpus))
        if gpus % larger.gpus_per_node:
            larger = replace(larger, gpus_per_node=1)
        tried = replace(setting, world=larger, strategy="fsdp", offload=False, shard_ranks=None)
        per_gpu = -(-facts.global_batch // tried.data_ranks)
        try:
            # Accumulation needs smaller micro-batches, but keeps whole gradients.
            if any(estimate(facts, at_micro_batch(facts, tried, size)).fits(reserve) for size in (1, per_gpu)):
                return gpus
        except UsageError:
            return None
        gpus *= 2
    return None
