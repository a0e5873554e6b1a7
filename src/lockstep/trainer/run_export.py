"""Files of an export besides weights: a program that torch runs without Lockstep, and the source of a user's task."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core import task_checks
from lockstep.core.data.loader import is_default
from lockstep.core.presenter import Presenter
from lockstep.core.task import Task
from lockstep.tasks.program import Computed, Program, without_program, write_program

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


def _of_predict(task: Task, model: nn.Module) -> Program:
    """`Task.predict` for batches like that of the first samples of the data."""
    data: Any = task.eval_data()
    if data is None or len(data) == 0:
        data = task.train_data()
    samples = [task.prepare(data[index], 0, False) for index in range(min(_SAMPLES, len(data)))]

    def compute(model: nn.Module, batch: Any) -> Any:
        return task.predict(model, batch)

    return Program(Computed(compute, model), {"batch": task.collate(samples)})
