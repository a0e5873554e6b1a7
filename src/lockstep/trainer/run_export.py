"""Files of an export besides weights: a program that torch runs without Lockstep, and the source of a user's task."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core import task_checks
from lockstep.core.defaults import is_default
from lockstep.core.presenter import Presenter
from lockstep.core.program import Computed, Program, without_program, write_program
from lockstep.core.task import Task
from lockstep.lora import exports
from lockstep.lora.frozen import BASE

_SOURCE = "source"
_SAMPLES = 2  # torch takes a size of 0 or 1 for a size that never changes


def copy_source(run_dir: Path, folder: Path) -> None:
    """Copy the source of the user's task, if the run directory has it, into the folder of an export."""
    if (run_dir / _SOURCE).is_dir():
        shutil.copytree(run_dir / _SOURCE, folder / _SOURCE, dirs_exist_ok=True)


def write_program_of(task: Task, presenter: Presenter, state: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the program of the trained model.

    It is made of a new model on the CPU with the exported weights. So it is the same for every strategy, device,
    precision, memory format and compilation.

    Args:
        state: of the model: whole tensors in host memory, and what its modules' `get_extra_state` return.
        folder: of the export.

    Returns:
        warnings: why there is no program.
    """
    if not presenter.has_program:
        return []
    try:
        with torch.random.fork_rng(devices=[]):
            model = task_checks.model(task)
        model.load_state_dict(dict(state))
        model.eval()
        program = _of_predict(task, model) if is_default(presenter.program) else presenter.program(model)
    except Exception as error:  # of the user's code, which may need data that is not here
        return [without_program(error)]
    return write_program(program, folder)


def weights_of(task: Task, presenter: Presenter, model: nn.Module, state: Mapping[str, Any]) -> tuple[str, Any]:
    """The file of weights and its tensors: those of the presenter; by default only adapters of peft, or merged.

    Args:
        state: see `write_program_of`.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not is_default(presenter.export_weights) or not (exports.is_peft(model) or BASE in model._modules):
        return presenter.export_weights(model, tensors)
    if exports.is_peft(model) and not presenter.merged:
        return exports.ADAPTER_FILE, exports.adapters(model, tensors)
    whole = task_checks.model(task)
    whole.load_state_dict(dict(state))
    if exports.is_peft(model):
        return "model.safetensors", exports.merged(whole)
    delattr(whole, BASE)
    return presenter.export_weights(whole, whole.state_dict())


def write_adapter_config(presenter: Presenter, model: nn.Module, folder: Path) -> None:
    """Write the config that peft reads next to adapters, or that transformers reads next to merged weights."""
    if is_default(presenter.export_weights) and exports.is_peft(model):
        (exports.write_config_of_base if presenter.merged else exports.write_config)(model, folder)


def _of_predict(task: Task, model: nn.Module) -> Program:
    """`Task.predict` for batches like that of the first samples of the data."""
    data: Any = task.eval_data()
    if data is None or len(data) == 0:
        data = task.train_data()
    samples = [task.prepare(data[index], 0, False) for index in range(min(_SAMPLES, len(data)))]

    def compute(model: nn.Module, batch: Any) -> Any:
        return task.predict(model, batch)

    return Program(Computed(compute, model), {"batch": task.collate(samples)})
