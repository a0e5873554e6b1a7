"""Exports of a trained model: weights as safetensors, a program for torch, the source of a user's task."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.core import atomic, caller, task_checks
from lockstep.core.defaults import is_default
from lockstep.core.errors import CheckpointError, UsageError
from lockstep.core.parallel.sharded_tensor import gather_on_rank0
from lockstep.core.presenter import Presenter
from lockstep.core.program import Computed, Program, without_program, write_program
from lockstep.core.task import Task
from lockstep.lora import exports
from lockstep.lora.frozen import BASE
from lockstep.trainer.trained_model import TrainedModel

_STAGING = ".staging-export-"
_SOURCE = "source"
_SAMPLES = 2  # torch takes a size of 0 or 1 for a size that never changes


def write(used: TrainedModel, folder: Path, *, program: bool, merge: bool, force: bool) -> Path:
    """See `Trainer.export`."""
    model, task, world, setup = used.load().unwrapped.model, used.task, used.world, used.setup
    about = {"lockstep": lockstep.__version__, "run": setup.config.name}
    # Every rank gathers one tensor at a time. Rank 0 keeps the tensors in host memory, and writes.
    held = model.state_dict()
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    whole = {name: gather_on_rank0(tensor, world) for name, tensor in tensors.items()}
    presenter, warnings = task.presenter(task), list[str]()
    presenter.merged, presenter.step = merge, used.loaded_step
    left_out = sorted(held.keys() - tensors.keys())
    if left_out and is_default(presenter.export_weights) and not exports.is_peft(model):
        warnings.append(
            f"the file holds tensors only. It leaves out what get_extra_state returned: {', '.join(left_out)}. "
            "lockstep export --optimizer writes all"
        )

    def add_files(staging: Path) -> None:
        warnings.extend(presenter.export(model, staging) or ())
        _write_adapter_config(presenter, model, staging)
        _copy_source(setup.run_dir, staging)
        if program:
            warnings.extend(_write_program(task, presenter, held | whole, staging))

    def write() -> Path:
        name, weights = _weights_of(task, presenter, model, held | whole)
        return export_weights(weights, folder, about, add_files, name, force=force)

    file = world.on_rank0(write)
    for text in [] if setup.quiet else warnings:
        print(f"warning: {caller.words(text)}", file=sys.stderr)
    return file


def _copy_source(run_dir: Path, folder: Path) -> None:
    """Copy the source of the user's task, if the run directory has it, into the folder of an export."""
    if (run_dir / _SOURCE).is_dir():
        shutil.copytree(run_dir / _SOURCE, folder / _SOURCE, dirs_exist_ok=True)


def _write_program(task: Task, presenter: Presenter, state: Mapping[str, Any], folder: Path) -> list[str]:
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


def _weights_of(task: Task, presenter: Presenter, model: nn.Module, state: Mapping[str, Any]) -> tuple[str, Any]:
    """The file of weights and its tensors: those of the presenter; by default only adapters of peft, or merged.

    Args:
        state: see `_write_program`.
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


def _write_adapter_config(presenter: Presenter, model: nn.Module, folder: Path) -> None:
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


def export_weights(
    tensors: Mapping[str, Tensor],
    folder: Path,
    about: Mapping[str, str],
    extras: Callable[[Path], None] = lambda _: None,
    name: str = "model.safetensors",
    *,
    force: bool = False,
) -> Path:
    """Write `folder/NAME`. A kill at any instant leaves the whole folder, or nothing of that name.

    Args:
        tensors: whole tensors, on any device. Tied and non-contiguous tensors are each written separately.
        folder: a new or an empty folder. Missing parents are made.
        about: text for the metadata of the file, besides `{"format": "pt"}`.
        extras: writes further files into the folder that it is given, which becomes `folder`, before the weights are
            there. What it raises comes through, except an OSError.
        name: of the file.
        force: delete an earlier export that is at `folder`, with all in it.

    Returns:
        the file with the weights.

    Raises:
        UsageError: `folder` is a file, or is not empty; or `extras` writes the file of weights.
        CheckpointError: the disk is full or not writable; nothing is left behind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = folder.resolve()
    missing: list[Path] = []  # parents that are made
    try:
        check_free(folder, force=force)
        missing = [parent for parent in folder.parents if not parent.exists()]
        with atomic.staged_folder(folder, folder.parent / f"{_STAGING}{folder.name}", replace=force) as staging:
            extras(staging)
            if (staging / name).exists():
                raise UsageError(
                    f"it writes {name}",
                    where="Presenter.export",
                    remedy="leave the weights to Lockstep, which writes this file under the names of Task.model, "
                    "or give the file another name",
                )
            save_file(_independent(tensors), staging / name, metadata={"format": "pt", **about})
            (staging / name).chmod(staging.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read
    except BaseException as error:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        free = _free_mib(folder)
        raise CheckpointError(
            f"cannot be written with {free} MiB free: {error}",
            where=str(folder),
            remedy="free disk space, repair permissions, or give another folder",
        ) from error
    return folder / name


def check_free(folder: Path, *, force: bool) -> None:
    """Check that an export can be written to `folder`: it is new or empty; with `force`, it may be an earlier export.

    Raises:
        UsageError: it is a file, or holds something else.
        OSError: it cannot be read.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    is_export = folder.is_dir() and any(map(_is_ours, folder.glob("*.safetensors")))
    if is_export and force:
        return
    what = "is an earlier export" if is_export else "exists and is not empty" if folder.is_dir() else "is a file"
    remedy = "give a new or empty folder" + ", or --force to delete the earlier export first" * is_export
    raise UsageError(what, where=str(folder), remedy=remedy)


def _is_ours(file: Path) -> bool:
    """True if an export of Lockstep wrote this file of weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as weights:
            return "lockstep" in (weights.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return own


def _free_mib(folder: Path) -> int:
    """Free MiB on the disk of `folder`, also if it does not exist."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free // 2**20
    return 0
