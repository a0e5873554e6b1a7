"""Exports weights for use without Lockstep, as safetensors."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from lockstep.core import atomic
from lockstep.core.errors import CheckpointError, UsageError

_STAGING = ".staging-export-"


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
