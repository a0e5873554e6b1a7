"""What `lockstep plan` does, from a target to a `Plan`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep import shortages
from lockstep.errors import DataError, UsageError
from lockstep.plan import stand_in
from lockstep.plan.facts import facts_of
from lockstep.plan.model_facts import ModelFacts
from lockstep.plan.search import Plan, save_interval, search
from lockstep.plan.setting import PrecisionName, World
from lockstep.plan.stand_in import MadeUp
from lockstep.tasks import registry

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.tasks.task import Task

NOTHING_KNOWN = MadeUp()


def plan_of(
    config: RunConfig,
    world: World,
    *,
    precisions: Sequence[PrecisionName] | None = None,
    reserve: float = 0.1,
    failures_per_gpu_year: float | None = None,
    save_seconds: float | None = None,
    made_up: MadeUp | None = NOTHING_KNOWN,
) -> Plan:
    """The plan of a training in a world.

    Args:
        precisions: None: fp32, and what the GPU has of bf16 and fp16; bf16, where the GPU is not known.
        made_up: what is known of data that are not here: made-up samples take their place. None: they must be here.

    Raises:
        DataError, UsageError: the task's data or model cannot be made, or an option is wrong.
    """
    if (failures_per_gpu_year is None) != (save_seconds is None):
        raise UsageError(
            "a failure rate and the cost of saving belong together",
            where="--failures-per-gpu-year, --save-seconds",
            remedy="give both, or neither",
        )
    interval = None
    if failures_per_gpu_year is not None and save_seconds is not None:
        interval = save_interval(save_seconds, failures_per_gpu_year, world.gpus)
    asked = config
    config = config.model_copy(update={"batch": config.batch.resolve(world.gpus)})
    chosen = tuple(precisions or _precisions(world))
    facts = facts_with_or_without_data(config, precisions=chosen, made_up=made_up)
    parallel = config.parallel
    details = {
        name: getattr(parallel, name)
        for name in ("param_dtype", "reduce_dtype", "reshard_after_forward", "shard_ranks", "gradient_as_bucket_view")
    }
    facts = replace(facts, notes=[*_notes_on_the_batch(facts, world), *facts.notes])
    found = search(facts, world, precisions=chosen, reserve=reserve, details=details)
    keys = [*found.keys, *_switched_off(asked, found.keys, facts.global_batch)]
    return replace(found, keys=keys, save_every_seconds=interval)


def _notes_on_the_batch(facts: ModelFacts, world: World) -> list[str]:
    """What does not fit together: the global batch, the GPUs and the samples of an epoch."""
    notes, batch = [], facts.global_batch
    if batch < world.gpus:
        notes.append(
            f"batch.global={batch} is less than the {world.gpus} GPUs: {world.gpus - batch} of them have no sample in "
            f"any step, and are paid for; use at most {batch} GPUs, or raise batch.global"
        )
    if facts.samples is not None and batch > facts.samples:
        notes.append(
            f"batch.global={batch} is more than the {facts.samples} samples of an epoch: a step then has "
            f"{facts.samples} samples, and needs less memory and time than is told here; lower batch.global"
        )
    return notes


def _switched_off(config: RunConfig, keys: Sequence[str], global_batch: int) -> list[str]:
    """What the config has, and what the recommended option does without."""
    if not keys:
        return []
    named = {key.partition("=")[0] for key in keys}
    on = {
        f"batch.global={global_batch}": config.batch.per_rank is not None,  # `batch.micro` goes together with it alone
        "batch.per_rank=null": config.batch.per_rank is not None,
        "batch.accumulate=null": config.batch.accumulate is not None,
        "parallel.cpu_offload=false": config.parallel.cpu_offload,
        "parallel.shard_ranks=null": config.parallel.shard_ranks is not None,
        "compute.activation_checkpointing=false": config.compute.activation_checkpointing,
    }
    return [key for key, has in on.items() if has and key.partition("=")[0] not in named]


def _precisions(world: World) -> tuple[PrecisionName, ...]:
    peaks = world.peak_flops
    if not peaks or "bf16" in peaks:
        return ("fp32", "bf16")
    return ("fp32", "fp16") if "fp16" in peaks else ("fp32",)


def facts_with_or_without_data(
    config: RunConfig,
    *,
    precisions: Sequence[PrecisionName] = ("fp32", "bf16"),
    device: Literal["cpu", "cuda"] = "cuda",
    recompute: tuple[bool, ...] = (False, True),
    made_up: MadeUp | None = NOTHING_KNOWN,
) -> ModelFacts:
    """The facts of the config's task: with its data, or with made-up samples where it has none here.

    Raises:
        DataError, UsageError: the task's data or model cannot be made, and made-up samples do not help.
    """
    says_more = made_up is not None and made_up != NOTHING_KNOWN
    try:
        task = _task(config, config.data.train)
        if not says_more:
            return facts_of(task, config, precisions=tuple(precisions), device=device, recompute=recompute)
        task.train_data()  # it says whether there are data, long before the model is traced
    except (DataError, UsageError) as error:
        if made_up is None or not _concerns_data(config, error):
            raise
        with shortages.temporary_folder() as folder:
            train = stand_in.write(config.task, folder / "data", made_up.classes)
            if train is None:
                raise
            data = config.data.model_copy(update={"cache": None, "cache_size": None, "eval": None})
            without = config.model_copy(update={"data": data})
            facts = facts_of(
                _task(without, str(train)),
                without,
                precisions=tuple(precisions),
                device=device,
                recompute=recompute,
                has_data=False,
            )
            notes = [stand_in.assumption(config.task, made_up.classes), *facts.notes]
            return replace(facts, samples=made_up.samples, notes=notes)
    option = "--classes" if made_up and made_up.classes else "--samples"
    remedy = "leave this option out: the data themselves tell it"
    raise UsageError("is for data that are not here, and these are here", where=option, remedy=remedy)


def _concerns_data(config: RunConfig, error: Exception) -> bool:
    """Whether an error says that there are no data here: none are named, or those that are named are not here."""
    train = config.data.train
    return train is None or (isinstance(error, DataError) and not Path(train).expanduser().exists())


def _task(config: RunConfig, train: str | None) -> Task:
    held_out = next(iter(config.data.eval_sources.values()))
    paths = [source and os.path.expanduser(source) for source in (train, held_out)]
    return registry.build_task(config.task, paths[0], paths[1], fold=config.data.fold)
