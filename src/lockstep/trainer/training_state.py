"""The state of a training as a file of `torch.save`, from which plain torch continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.core import atomic, optimizer_class
from lockstep.core.checkpoint import files, nested
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import CheckpointError
from lockstep.core.run_model import make_schedule
from lockstep.core.schedule import set_lr
from lockstep.core.user_files import check_replaceable
from lockstep.weights.torch_file import OPTIMIZER_CLASS
from lockstep.weights.torch_optimizer import Slots

_OWN_KEYS = ("name", "base_lr", "params")  # of our groups


def as_torch(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    of_task: Callable[[int], float] | None = None,
) -> dict[str, Any]:
    """A checkpoint in the formats of plain torch, with whole tensors on the CPU, whichever strategy has saved it.

    Args:
        model, optimizer: of the run. Only names, order and settings of their parameters are read.
        of_task: `Task.schedule`, if the task has this method.

    Returns:
        - model: the weights with which the training continues; `model.load_state_dict` takes it
        - optimizer: `load_state_dict` of the optimizer takes it. Learning rates are those of the next update. A list,
          if groups have their own optimizers
        - optimizer_class: the name of its class; a list, if there are several
        - model_ema: averaged weights by name, if the run keeps an average
        - scaler: the state of a GradScaler, with fp16
        - step, epoch: steps and whole epochs that are done
        - lockstep: the version that wrote it

    Raises:
        CheckpointError: the checkpoint does not fit the model, or is damaged.
    """
    manifest = checkpoint.manifest
    checkpoint_state.check_fits(checkpoint.index, model, values=checkpoint.values)
    found: dict[str, Any] = {
        name: nested.decode(saved, torch.device("cpu")) for name, saved in checkpoint.values.items()
    }
    found |= files.read(checkpoint.path, checkpoint.index)
    of_kind: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "group": {}, "ema": {}}
    for name, value in found.items():
        kind, _, rest = name.partition(".")
        of_kind[kind][rest] = value
    slots: Slots = {}
    for name, value in of_kind["optimizer"].items():
        parameter, _, slot = name.rpartition(".")
        slots.setdefault(parameter, {})[slot] = value
    per_epoch = -(-manifest["data"]["samples"] // (config.batch.global_ or 1))
    if config.data.drop_last:
        per_epoch = max(1, manifest["data"]["samples"] // (config.batch.global_ or 1))
    curve = config.schedule.model_copy(update={"total_steps": manifest["schedule_steps"]})
    schedule = make_schedule(curve, total=1, steps_per_epoch=per_epoch, of_task=of_task)
    if schedule.history is not None:
        schedule.history.restore(manifest["plateau"][1], manifest["plateau"][0], "schedule.plateau")
    set_lr(optimizer, schedule(manifest["step"] - manifest["skipped"]))
    for place, value in of_kind["group"].items():
        checkpoint_state.set_setting(optimizer, place, value)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = optimizer_class.members(optimizer)
    states = [_as_state_dict(slots, member.param_groups, names) for member in members]
    kinds = [type(member).__name__ for member in members]
    integers = ("growth_interval", "_growth_tracker")
    scale = {key: int(value) if key in integers else value for key, value in manifest["loss_scale"].items()}
    return {
        "model": {name: of_kind["model"][name] for name in model.state_dict() if name in of_kind["model"]},
        "optimizer": states[0] if len(states) == 1 else states,
        OPTIMIZER_CLASS: kinds[0] if len(kinds) == 1 else kinds,
        **({"model_ema": of_kind["ema"]} if of_kind["ema"] else {}),
        **({"scaler": scale} if scale else {}),
        "step": manifest["step"],
        "epoch": manifest["step"] // per_epoch,
        "lockstep": lockstep.__version__,
    }


def _as_state_dict(slots: Slots, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, Any]:
    """The state as `state_dict()` of `torch.optim` would return it, with the names of the parameters as `param_names`.

    Args:
        slots: whole tensors and plain values.
        groups: `param_groups` of the optimizer, in their order.
        names: by the identity (`id`) of a parameter.
    """
    packed, number = [], 0
    numbers: dict[str, int] = {}
    for group in groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        numbers |= {name: number + place for place, name in enumerate(members)}
        settings = {key: value for key, value in group.items() if key not in _OWN_KEYS}
        indices = list(range(number, number + len(members)))
        packed.append({**settings, "initial_lr": group["base_lr"], "params": indices, "param_names": members})
        number += len(members)
    state = {numbers[name]: dict(own) for name, own in slots.items() if name in numbers}
    return {"state": state, "param_groups": packed}


def write(content: Mapping[str, Any], path: Path, *, force: bool = False) -> Path:
    """Write `content` with `torch.save`. A kill at any instant leaves the whole file, or nothing of that name.

    Args:
        force: replace a file that exists.

    Raises:
        UsageError: `path` exists.
        CheckpointError: the disk is full or not writable.
    """
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path, force=force)
        with atomic.staged_file(path) as staging:
            torch.save(dict(content), staging)
        atomic.sync(path.parent)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a stream cannot be written
        remedy = "free disk space, repair permissions, or give another place"
        raise CheckpointError(f"cannot be written: {error}", where=str(path), remedy=remedy) from error
    return path
