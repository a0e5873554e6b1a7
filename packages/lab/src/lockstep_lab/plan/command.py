"""How `lockstep plan` gets from a target to a `PlanResult`, with made-up samples if there are no data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lockstep.configs import registry
from lockstep.core import shortages
from lockstep.core.errors import DataError, UsageError, number_of
from lockstep.mesh import layout
from lockstep.trainer import foreign
from lockstep_lab.plan.facts import facts_of
from lockstep_lab.plan.inputs import Machines, ModelFacts, PrecisionName
from lockstep_lab.plan.search import PlanResult, save_interval, search

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep.core.task import Task

_SAMPLES = 8  # made up
_TENSOR = (2, 4, 8)  # values of `parallel.tensor` that a plan may propose


@dataclass(frozen=True)
class MadeUp:
    """Facts about training data that are not on this machine."""

    classes: int | None = None
    """None: 10."""
    samples: int | None = None
    """None: unknown. The plan then says nothing about epochs."""


NOTHING_KNOWN = MadeUp()


def plan_of(
    config: RunConfig,
    world: Machines,
    *,
    precisions: Sequence[PrecisionName] | None = None,
    reserve: float = 0.1,
    failures_per_gpu_year: float | None = None,
    save_seconds: float | None = None,
    made_up: MadeUp | None = NOTHING_KNOWN,
) -> PlanResult:
    """The plan of a training in a world.

    Args:
        precisions: None: fp32 and, if the GPU has them, bf16 and fp16; bf16 if the GPU is unknown.
        made_up: what is known about missing data, which made-up samples replace. None: the data must be here.

    Raises:
        DataError, UsageError: the task's data or model cannot be made, or an option is wrong.
    """
    if (failures_per_gpu_year is None) != (save_seconds is None):
        what, where = (
            "a failure rate and the cost of saving go together",
            "plan.failures_per_gpu_year, plan.save_seconds",
        )
        raise UsageError(what, where=where, remedy="give both, or neither")
    interval = None
    if failures_per_gpu_year is not None and save_seconds is not None:
        interval = save_interval(save_seconds, failures_per_gpu_year, world.gpus)
    chosen = tuple(precisions or _precisions(world))
    names = ("param_dtype", "reduce_dtype", "reshard_after_forward", "shard_ranks", "gradient_as_bucket_view")
    details = {name: getattr(config.parallel, name) for name in (*names, "reduce_each_micro_batch", "virtual_ranks")}

    def planned(config: RunConfig) -> PlanResult:
        tensor = config.parallel.tensor
        facts = facts_with_or_without_data(config, precisions=chosen, made_up=made_up)
        facts.notes[:0] = _notes_on_the_batch(facts, world, tensor)
        return search(facts, world, precisions=chosen, reserve=reserve, details=details | {"tensor": tensor})

    resolved = with_tensor(config, config.parallel.tensor if world.gpus > 1 else 1, world.gpus, world.gpus_per_node)
    found = planned(resolved)
    if resolved.parallel.tensor == 1 and world.memory_bytes:
        found = _or_cut(found, resolved, planned)
    mode = config.compute.activation_checkpointing or True
    found.keys[:] = [key.replace("checkpointing=true", f"checkpointing={mode}".lower()) for key in found.keys]
    keys = [*found.keys, *_switched_off(config, found.keys, found.facts.global_batch)]
    return replace(found, keys=keys, save_every_seconds=interval)


def with_tensor(config: RunConfig, tensor: int, gpus: int, gpus_per_node: int | None = None) -> RunConfig:
    """The config with this `parallel.tensor`, and with a number as its global batch.

    Raises:
        UsageError: the number does not fit the GPUs or other keys.
    """
    parallel = config.parallel.model_copy(update={"tensor": tensor})
    if tensor > 1:
        layout.check(config.model_copy(update={"parallel": parallel}), gpus_per_node or gpus, " of a machine")
    return config.model_copy(update={"parallel": parallel, "batch": config.batch.resolve(gpus // tensor)})


def _or_cut(found: PlanResult, config: RunConfig, planned: Callable[[RunConfig], PlanResult]) -> PlanResult:
    """The plan or, if nothing fits without offloading, one with the smallest `parallel.tensor` that fits."""
    world = found.world
    if any(o.fits is not False and o.estimate and not o.estimate.setting.offload for o in found.options):
        return found
    for tensor in [n for n in _TENSOR if world.gpus % n == 0 and world.gpus_per_node % n == 0]:
        try:
            cut = planned(with_tensor(config, tensor, world.gpus, world.gpus_per_node))
        except UsageError as error:
            found.facts.notes.append(f"parallel.tensor={tensor} was not tried: {error}")
            return found
        if cut.recommended is not None and cut.recommended.fits:
            options = [*found.options, *(option for option in cut.options if option.estimate is not None)]
            reason = f"{cut.reason}; with parallel.tensor=1 nothing fits on the GPUs (lockstep --explain mesh)"
            return replace(cut, facts=found.facts, options=options, reason=reason)
        found.facts.notes.append(f"parallel.tensor={tensor} does not fit either")
    return found


def _notes_on_the_batch(facts: ModelFacts, world: Machines, tensor: int = 1) -> list[str]:
    """Notes on a global batch that does not suit the GPUs or the samples of an epoch."""
    notes, batch, ranks = [], facts.global_batch, world.gpus // tensor
    if batch < ranks:
        notes.append(
            f"batch.global={batch} is less than the {ranks} {'GPUs' if tensor == 1 else 'tensor groups'}: "
            f"{ranks - batch} of them never get a sample; use at most {batch * tensor} GPUs, "
            "or raise batch.global"
        )
    if facts.samples is not None and batch > facts.samples:
        notes.append(
            f"batch.global={batch} exceeds the {facts.samples} samples of an epoch: a step then has "
            f"{facts.samples} samples, and needs less memory and time than planned; lower batch.global"
        )
    return notes


def _switched_off(config: RunConfig, keys: Sequence[str], global_batch: int) -> list[str]:
    """Overrides for keys that the config sets, and that the recommended option does not need."""
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


def _precisions(world: Machines) -> tuple[PrecisionName, ...]:
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
    """The facts of the config's task: from its data or, if there are none here, from made-up samples.

    Raises:
        DataError, UsageError: the task's data or model cannot be made, not even with made-up samples.
    """
    facts = partial(facts_of, precisions=tuple(precisions), device=device, recompute=recompute)
    try:
        task = _task(config, config.data.train)
        if made_up is None or made_up == NOTHING_KNOWN:
            return facts(task, config)
        task.train_data()  # fails early if there are no data, before the model is traced
    except (DataError, UsageError) as error:
        if made_up is None or not _concerns_data(config, error):
            raise
        with shortages.temporary_folder() as folder:
            train = write_samples(config.task, folder / "data", made_up.classes)
            if train is None:
                raise
            data = config.data.model_copy(update={"cache": None, "cache_size": None, "eval": None})
            without = config.model_copy(update={"data": data})
            found = facts(_task(without, str(train)), without, has_data=False)
            notes = [assumption(config.task, made_up.classes), *found.notes]
            return replace(found, samples=made_up.samples, notes=notes)
    key = "plan.classes" if made_up.classes else "plan.samples"
    remedy = "leave this key out: the data determine it"
    raise UsageError("is only for data that are not on this machine, but these are", where=key, remedy=remedy)


def _concerns_data(config: RunConfig, error: Exception) -> bool:
    """True if an error means that there are no data here: none are configured, or the configured data are missing."""
    train = config.data.train
    return train is None or (isinstance(error, DataError) and not Path(train).expanduser().exists())


def _task(config: RunConfig, train: str | None) -> Task:
    held_out = next(iter(config.data.eval_sources.values()))
    paths = [source and os.path.expanduser(source) for source in (train, held_out)]
    return foreign.configured(registry.build_task(config.task, paths[0], paths[1], fold=config.data.fold), config)


# ---- made-up samples of the sizes that a recipe configures


def write_samples(task: Mapping[str, Any], folder: Path, classes: int | None = None) -> Path | None:
    """Write a small data set for the config's section `task`. Returns `data.train`, or None for kinds without one.

    Args:
        task: `kind` and its options.
        folder: a new folder.
        classes: None: 10.

    Raises:
        UsageError: the task defines its own classes, or has none.
    """
    _check_classes(task, classes)
    writer = _WRITERS.get(str(task.get("kind")))
    if writer is None:
        return None
    folder.mkdir(parents=True)
    return writer(task, folder, _class_count(task, classes), np.random.default_rng(0))


def assumption(task: Mapping[str, Any], classes: int | None = None) -> str:
    """The assumptions of a plan on made-up samples, for people."""
    count = _class_count(task, classes)
    assumed = {
        "classification": number_of(count, "class"),
        "segmentation": number_of(count, "class"),
        "detection": f"{number_of(count, 'class')}, and 5 boxes in an image",
        "text": f"{number_of(count, 'class')}, and texts of task.max_length tokens; a new tokenizer knows only "
        "made-up words",
        "volume_risk": "3 questions, and volumes of task.max_slices slices",
    }
    return f"there are no data: made-up samples, with {assumed[str(task['kind'])]}"


def _check_classes(task: Mapping[str, Any], classes: int | None) -> None:
    if classes is None:
        return
    if task.get("kind") == "volume_risk":
        what = "this task has no classes: a plan without data assumes 3 questions"
    elif task.get("kind") == "segmentation" and task.get("classes"):
        what = "task.classes already sets the classes"
    else:
        return
    raise UsageError(what, where=f"plan.classes={classes}", remedy="leave this key out")


def _class_count(task: Mapping[str, Any], classes: int | None) -> int:
    named = task.get("classes") if task.get("kind") == "segmentation" else None
    return len(named) if isinstance(named, list | dict) else 2 if named else classes or 10


def _side(task: Mapping[str, Any]) -> int:
    size = task.get("image_size") or 224
    return max(size.values()) if isinstance(size, Mapping) else int(size)


def _picture(path: Path, task: Mapping[str, Any], draw: np.random.Generator) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    noise = draw.integers(0, 256, (_side(task), _side(task), 3), dtype=np.uint8)
    Image.fromarray(noise if int(task.get("channels", 3)) == 3 else noise[..., 0]).save(path, compress_level=1)


def _classification(task: Mapping[str, Any], folder: Path, classes: int, draw: np.random.Generator) -> Path:
    for number in range(classes):
        path = folder / f"class{number}" / "0.png"
        if number < _SAMPLES:
            _picture(path, task, draw)
        else:
            path.parent.mkdir()
            os.link(folder / f"class{number % _SAMPLES}" / "0.png", path)
    return folder


def _segmentation(task: Mapping[str, Any], folder: Path, classes: int, draw: np.random.Generator) -> Path:
    from PIL import Image

    (folder / "masks").mkdir()
    if not task.get("classes"):
        (folder / "classes.yaml").write_text(json.dumps([f"class{number}" for number in range(classes)]))
    for number in range(_SAMPLES):
        _picture(folder / "images" / f"{number}.png", task, draw)
        mask = draw.integers(0, min(classes, 256), (_side(task), _side(task)), dtype=np.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    return folder


def _detection(task: Mapping[str, Any], folder: Path, classes: int, draw: np.random.Generator) -> Path:
    side = _side(task)
    box, boxes = side // 4, 5 * _SAMPLES
    for number in range(_SAMPLES):
        _picture(folder / "images" / "train" / f"{number}.png", task, draw)
    corners = draw.integers(0, side - box, (boxes, 2)).tolist()
    sizes = {"height": side, "width": side}
    content = {
        "images": [{"id": number, "file_name": f"{number}.png", **sizes} for number in range(_SAMPLES)],
        "annotations": [
            {"id": n, "image_id": n // 5, "category_id": n % classes, "bbox": [*corner, box, box], "area": box * box}
            for n, corner in enumerate(corners)
        ],
        "categories": [{"id": number, "name": f"class{number}"} for number in range(classes)],
    }
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return folder


def _text(task: Mapping[str, Any], folder: Path, classes: int, draw: np.random.Generator) -> Path:
    words = ["".join(draw.choice(list("abcdefghijklmnopqrstuvwxyz"), 5)) for _ in range(2000)]
    lines, length = ["text,label"], int(task.get("max_length") or 128)
    lines += [f"{' '.join(draw.choice(words, length))},class{number % classes}" for number in range(_SAMPLES * classes)]
    (folder / "texts.csv").write_text("\n".join(lines) + "\n")
    return folder / "texts.csv"


def _volume_risk(task: Mapping[str, Any], folder: Path, _: int, draw: np.random.Generator) -> Path:
    slices, side, lines = int(task.get("max_slices") or 32), int(task.get("image_size") or 448), list[str]()
    for number in range(_SAMPLES):
        np.save(folder / f"volume{number}.npy", draw.integers(-1000, 400, (slices, side, side), dtype=np.int16))
        lines.append(f"volume{number}.npy,patient{number},{number % 2},{number % 2},1")
    (folder / "labels.csv").write_text("\n".join(["path,patient,death_1y,death_3y,death_5y", *lines]) + "\n")
    return folder / "labels.csv"


_WRITERS: dict[str, Callable[[Mapping[str, Any], Path, int, np.random.Generator], Path]] = {
    "classification": _classification,
    "segmentation": _segmentation,
    "detection": _detection,
    "text": _text,
    "volume_risk": _volume_risk,
}
