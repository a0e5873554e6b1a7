"""Whose a folder is: what marks a run directory, what in it is Lockstep's, and what keeps a run out of a folder."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.core import atomic
from lockstep.core.checkpoint import manifest
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.errors import UsageError

MARKER = "environment.json"
"""The file that marks a run directory. It is the first file of a run, and the last that is deleted."""
_KEYS_OF_MARKER = {"lockstep", "torch", "world"}
_LOCK = ".lock"
_KEYS_OF_CONFIG = {
    "name",
    "seed",
    "task",
    "data",
    "batch",
    "train",
    "optim",
    "schedule",
    "precision",
    "checkpoint",
    "log",
}
"""The keys that config.yaml of a run always has. A user's own file leaves out what has a default."""

MICRO_BATCH = "micro.json"
METRIC_ARRAYS, EVALUATIONS, MODEL_TABLE = "metric_arrays.jsonl", "evaluations.jsonl", "model.txt"
TASK_BEFORE = ".task-before"
"""The folder `task` as it was before a start whose config has changed. See `run_directory.claim`."""
DESCRIBING = ("config.yaml", MARKER, "task", "source", MODEL_TABLE, "train.log", "metrics.jsonl")
"""Files and folders that describe a run. With a checkpoint they are a run directory that can be evaluated."""
OURS: Mapping[str, str] = {
    "checkpoints": r"(suspect-)?step-\d{8,}|\.staging-.+",
    "samples": r"augmented\.png|(worst-)?step-\d{8,}\.png",
    "pictures": r".+-step-\d{8,}\.png",
    "profile": r"rank\d+\.(json|txt)",
    "memory": r"rank\d+\.pickle",
    "watch": r"step-\d+|(verdict|checked)\.json",
    "configs": r"until-\d{8,}\.yaml",
    "tensorboard": r"events\.out\.tfevents\..+",
    "task": "",
    TASK_BEFORE: "",
    "source": "",
    MICRO_BATCH: "",
    METRIC_ARRAYS: "",
    EVALUATIONS: "",
    MODEL_TABLE: "",
    "report.html": "",
    "config.yaml": "",
    MARKER: "",
}
"""All that a run writes, besides the files of its writers. Nothing else is ever deleted.

By name, in the order of deletion: a pattern of what is Lockstep's in a folder, which users may put their own files
into; empty: the file, or the whole folder.
"""
_MAY_STAND_THERE = re.compile(r"\..*|lost\+found|verify-\w{8}")  # hidden, of the file system, of `lockstep verify`
_FILES_THAT_MAY = re.compile(
    r".*\.(log|out|err|[oe]\d+(\.\d+)?)|(log|out|err|output|stdout|stderr|nohup)\.txt"  # of schedulers and shells
    r"|slurm-requeues|verify\.(json|html)|hang-.*\.txt"  # of a job script, of `verify`, of a hang before the first step
)
_HANG_REPORT = re.compile(r"hang-\d{8}-\d{6}\.txt")
_SHOWN = 8  # names in an error


def retention_of(folder: Path) -> CheckpointConfig:
    """The section `checkpoint` of the config that a run directory records.

    Raises:
        UsageError: there is no config of a run.
    """
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        return CheckpointConfig.model_validate(config.get("checkpoint", {}))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        what = f"holds no config of a run: {type(error).__name__}: {error}"
        raise UsageError(what, where=str(path), remedy="give the directory of a run, such as runs/digits") from error


def recorded(folder: Path) -> dict[str, Any]:
    """The content of environment.json; empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        about = json.loads((folder / MARKER).read_text())
        return about if isinstance(about, dict) else {}
    return {}


def is_run(folder: Path) -> bool:
    """Tell a run directory from any other folder.

    It has Lockstep's environment.json. Runs of earlier versions that were killed before they had written this file,
    and copies without it, have a whole config.yaml next to Lockstep's lock or a checkpoint.
    """
    if recorded(folder).keys() >= _KEYS_OF_MARKER:
        return True
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    if not isinstance(config, dict) or not config.keys() >= _KEYS_OF_CONFIG:
        return False
    with contextlib.suppress(OSError, ValueError):
        if re.match(r"process \d+ on ", (folder / _LOCK).read_text()):
            return True
    return bool(manifest.listed(folder / "checkpoints"))


def check_free(folder: Path) -> None:
    """Check that `folder` is a run directory, or that a run may begin in it. Nothing is written.

    Raises:
        UsageError: the folder holds something else; names it.
        OSError: the folder cannot be read.
    """
    if not folder.is_dir() or is_run(folder):
        return
    names = [path for path in sorted(folder.iterdir()) if not _may_stand_there(path)]
    if not names:
        return
    listed = ", ".join(f"{path.name}{'/' * path.is_dir()}" for path in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    runs = [path for path in names if path.is_dir() and is_run(path)]
    such = f", or the directory of a run in it, such as {runs[0]}" if runs else f", such as {folder / 'run'}"
    raise UsageError(
        f"the folder is not a run directory, and is not empty: it has {listed}{more}",
        where=str(folder),
        remedy=f"give a new or an empty folder with --run-dir{such}",
    )


def _may_stand_there(path: Path) -> bool:
    """Allow what others put into a folder before a run begins: logs, hidden files, and folders of nothing else."""
    if _MAY_STAND_THERE.fullmatch(path.name):
        return True
    if path.is_dir():
        return all(map(_may_stand_there, path.iterdir()))
    return bool(_FILES_THAT_MAY.fullmatch(path.name)) and path.exists()


def ours(folder: Path, of_writers: Iterable[str]) -> list[Path]:
    """The files that a run has written into `folder`, in the order in which it is to be deleted.

    Args:
        of_writers: files and folders that writers make; see `Writer.files`.
    """
    found = []
    for name, pattern in {**dict.fromkeys(set(of_writers) - OURS.keys(), ""), **OURS}.items():
        path = folder / name
        if not pattern:
            found.append(path)
        elif path.is_dir():
            found += [inner for inner in sorted(path.iterdir()) if re.fullmatch(pattern, inner.name)]
    found += [path for path in sorted(folder.glob("hang-*.txt")) if _HANG_REPORT.fullmatch(path.name)]
    return [path for path in found if path.exists() or path.is_symlink()]


def delete_ours(folder: Path, of_writers: Iterable[str]) -> None:
    """Delete what a run has written into `folder`, but for the marker, and folders that are empty then.

    A link to a folder of checkpoints, samples or the like stays. Of other links only the link is deleted.
    """
    for path in ours(folder, of_writers):
        if path != folder / MARKER:
            atomic.remove(path)
    for name, pattern in OURS.items():
        if pattern and not (folder / name).is_symlink():
            with contextlib.suppress(OSError):  # it is not there, or has files of the user
                (folder / name).rmdir()
