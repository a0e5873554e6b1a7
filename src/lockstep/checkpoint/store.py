"""Checkpoints on disk: complete, or absent. A directory without a valid manifest, written last, is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import CheckpointError

_MANIFEST = "manifest.json"
_STATE = "state.pt"
_STAGING = ".staging-"


def write(folder: Path, step: int, state: dict[str, Any], about: dict[str, Any], keep_last: int | None = None) -> Path:
    """Write `folder/step-XXXXXXXX` so that a kill at any instant leaves either all of it or nothing that counts.

    Args:
        state: tensors and plain values. about: plain values for the manifest. keep_last: delete older ones.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    name = f"step-{step:08d}"
    staging, final = folder / f"{_STAGING}{name}", folder / name
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        with (staging / _STATE).open("wb") as file:
            torch.save(state, file)
            _flush(file)
        manifest = {"step": step, **about, "files": {_STATE: _digest(staging / _STATE)}}
        with (staging / _MANIFEST).open("w") as text:
            json.dump(manifest, text, indent=1)
            _flush(text)
        _sync_folder(staging)
        if final.exists():
            shutil.rmtree(final)  # of the same step: what is there now cannot be newer than what replaces it
        staging.rename(final)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(staging, ignore_errors=True)
        free = shutil.disk_usage(folder).free // 2**20 if folder.is_dir() else 0
        remedy = "free disk space or repair permissions, then run the same command"
        raise CheckpointError(f"cannot be written with {free} MiB free: {error}", where=str(final), remedy=remedy) from error
    if keep_last:
        for old in list(_folders(folder))[keep_last:]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the manifest of one checkpoint, after checking it. Tensors on the CPU; no code is unpickled.

    Raises:
        CheckpointError: not a complete checkpoint, or a file differs from its checksum.
    """
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
        for name, digest in manifest["files"].items():
            if _digest(checkpoint / name) != digest:
                raise CheckpointError(f"{name} differs from its checksum", where=str(checkpoint), remedy="it is damaged; delete it")
        state = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"not a complete checkpoint: {error}", where=str(checkpoint)) from error
    return state, manifest


def newest(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
    """State and manifest of the newest valid checkpoint, and messages about damaged ones that were passed over."""
    complaints: list[str] = []
    for checkpoint in _folders(folder):
        try:
            return *read(checkpoint), complaints
        except CheckpointError as error:
            complaints.append(f"passed over a damaged checkpoint: {error}")
    if complaints:
        raise CheckpointError("\n".join(complaints), where=str(folder), remedy="no valid checkpoint is left; start anew with --fresh")
    return None


def _folders(folder: Path) -> Iterator[Path]:
    """Newest first."""
    return iter(sorted((path for path in folder.glob("step-*") if (path / _MANIFEST).exists()), reverse=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
