"""Checkpoints on disk: complete, or absent. A directory without a valid manifest, written last, is no checkpoint.

checkpoints/step-00000123/          one share per rank, .metadata, index.json, manifest.json
checkpoints/.staging-step-00000123/ being written, or left by a process that was killed while it wrote

What an evaluation of the same step finds comes later, and is added to the manifest.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep import atomic
from lockstep.checkpoint import files
from lockstep.distributed.faults import fail_at
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError

MANIFEST = "manifest.json"
INDEX = "index.json"
_STAGING = ".staging-"


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a manifest. Whether its files are what the manifest says is for `check` to find."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(about["bytes"] for about in self.manifest["files"].values())

    @property
    def metrics(self) -> dict[str, float]:
        """Of the evaluation at this very step; empty where there was none, or it has not ended yet."""
        return dict(self.manifest["metrics"])

    @cached_property
    def _contents(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / INDEX).read_text())
        return content

    @property
    def index(self) -> files.Index:
        """Where each tensor is, by name."""
        return dict(self._contents["tensors"])

    @property
    def values(self) -> dict[str, Any]:
        """State that is no tensor, by name."""
        return dict(self._contents["values"])


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `last` newest, the best by a metric, and those of every n-th step.

    best: ("min" or "max", metric name).
    """

    last: int = 3
    best: tuple[str, str] | None = None
    every_steps: int | None = None

    def reasons(self, checkpoints: Iterable[Checkpoint]) -> dict[int, list[str]]:
        """Why each step stays; those that may go are left out."""
        found = sorted(checkpoints, key=lambda one: one.step)
        reasons: dict[int, list[str]] = {}
        for one in found[-self.last :]:
            reasons.setdefault(one.step, []).append("last")
        if self.best:
            sign, metric = (-1 if self.best[0] == "min" else 1), self.best[1]
            rated = [
                (sign * one.metrics[metric], one.step)
                for one in found
                if not math.isnan(one.metrics.get(metric, math.nan))
            ]
            if rated:
                reasons.setdefault(max(rated)[1], []).append("best")
        for one in found if self.every_steps else ():
            if one.step % (self.every_steps or 1) == 0:
                reasons.setdefault(one.step, []).append(f"every {self.every_steps}")
        return reasons


def staging(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it counts."""
    return folder / f"{_STAGING}step-{step:08d}"


def commit(
    folder: Path, step: int, manifest: Mapping[str, Any], index: files.Index, values: Mapping[str, Any]
) -> Checkpoint:
    """Turn what all ranks have staged into the checkpoint `folder/step-XXXXXXXX`: index, manifest, a rename.

    Raises:
        OSError: it cannot be written, or a share that a rank wrote is not here.
    """
    staged, final = staging(folder, step), folder / f"step-{step:08d}"
    for name, about in manifest["files"].items():
        if (staged / name).stat().st_size != about["bytes"]:
            raise OSError(f"{name} is not what was written; do all ranks see the same run directory?")
    files.write_dcp_metadata(staged, index)
    (staged / INDEX).write_text(json.dumps({"tensors": index, "values": dict(values)}))
    atomic.sync(staged / INDEX)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    more = {name: files.checksum(staged / name) for name in (INDEX, files.DCP_METADATA)}
    content = {**manifest, "saved_at": now, "files": {**manifest["files"], **more}}
    fail_at("before-manifest", step)
    with (staged / MANIFEST).open("w") as text:
        text.write(_signed(content))
        fail_at("in-manifest", step)
        text.flush()
        os.fsync(text.fileno())
    atomic.sync(staged)
    fail_at("before-rename", step)
    if final.exists():
        remove(final)  # of the same step: damaged, or it would have been resumed
    staged.rename(final)
    fail_at("after-rename", step)
    atomic.sync(folder)
    return Checkpoint(final, content)


def add_metrics(folder: Path, step: int, metrics: Mapping[str, float]) -> bool:
    """Give the checkpoint of `step` these metrics. A kill at any instant leaves the manifest as it was, or the new one.

    Returns:
        whether there is such a checkpoint.

    Raises:
        OSError: the manifest cannot be written.
    """
    path, staging = folder / f"step-{step:08d}", folder / f"{_STAGING}{MANIFEST}-{step:08d}"
    content = _manifest(path)
    if not isinstance(content, dict):
        return False
    fail_at("before-metrics", step)
    with atomic.staged_file(path / MANIFEST, staging), staging.open("w") as text:
        text.write(_signed({**content, "metrics": dict(metrics)}))
        fail_at("in-metrics", step)
    atomic.sync(path)
    return True


def listed(folder: Path) -> list[Checkpoint]:
    """All checkpoints, newest first. Their files are not checked."""
    found = [Checkpoint(path, manifest) for path in _folders(folder) if isinstance(manifest := _manifest(path), dict)]
    return sorted(found, key=lambda one: one.step, reverse=True)


def unreadable(folder: Path) -> list[str]:
    """Complaints about manifests that are there and damaged. (Without a manifest a directory is no checkpoint.)"""
    return [f"{path.name}: {fault}" for path in _folders(folder) if isinstance(fault := _manifest(path), str)]


def _folders(folder: Path) -> list[Path]:
    """Directories with a manifest, the newest last."""
    named = [
        path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and (path / MANIFEST).exists()
    ]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def _signed(content: Mapping[str, Any]) -> str:
    """A manifest as text, with a checksum of its own."""
    return json.dumps({"crc32": zlib.crc32(json.dumps(content).encode()), "checkpoint": content})


def _manifest(path: Path) -> dict[str, Any] | str | None:
    """The content of a manifest, what is wrong with it, or None where there is none."""
    try:
        text = (path / MANIFEST).read_text()
        content: dict[str, Any] = json.loads(text)["checkpoint"]
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    return content if text == _signed(content) else f"{MANIFEST} differs from its checksum"


def check(checkpoint: Checkpoint, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with its files, or with the `part`-th of `parts` shares of them; empty where nothing is."""
    faults = []
    for name, about in sorted(checkpoint.manifest["files"].items())[part::parts]:
        path = checkpoint.path / name
        try:
            found = files.checksum(path)
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found["bytes"] != about["bytes"]:
            faults.append(f"{name} has {found['bytes']} bytes, not {about['bytes']}")
        elif found != about:
            faults.append(f"{name} differs from its checksum")
    return faults


def newest(folder: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are all right, the same on every rank, which check a share of the files each.

    Returns:
        the checkpoint, None where there is none at all; and messages about damaged ones that were passed over.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    names: list[str] = world.broadcast([path.name for path in reversed(_folders(folder))])
    complaints: list[str] = []
    for name in names:
        manifest = _manifest(folder / name)
        if isinstance(manifest, dict):
            candidate = Checkpoint(folder / name, manifest)
            mine = check(candidate, world.rank, world.size)
        else:
            mine = [manifest or f"{MANIFEST} is not there"]
        found = list(dict.fromkeys(fault for rank in world.broadcast(world.gather(mine)) for fault in rank))
        if not found:
            return candidate, [f"passed over a damaged checkpoint: {complaint}" for complaint in complaints]
        complaints.append(f"{name}: {'; '.join(found)}")
    if complaints:
        raise CheckpointError(
            "\n".join(complaints), where=str(folder), remedy="no valid checkpoint is left; start anew with --fresh"
        )
    return None, []


def prune(
    folder: Path, retention: Retention, valid: Callable[[Checkpoint], bool] | None = None, newest: int | None = None
) -> list[Path]:
    """Delete what `retention` does not keep; returns what went.

    Args:
        newest: of which step the newest is that counts. What is newer was found damaged, and must not push out the good ones.
        valid: where given, the newest valid checkpoint stays in any case, and so does everything where none is valid.
    """
    found = [one for one in listed(folder) if newest is None or one.step <= newest]
    keep = set(retention.reasons(found))
    if valid is not None:
        good = next((one.step for one in found if valid(one)), None)
        if good is None:
            return []
        keep.add(good)
    gone = [one.path for one in found if one.step not in keep]
    for path in gone:
        remove(path)
    return gone


def clear_leftovers(folder: Path) -> list[Path]:
    """Delete what processes left that were killed while they wrote or deleted. Only while nobody writes."""
    leftovers = sorted(folder.glob(f"{_STAGING}*"))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, so that a kill in between leaves none rather than half of one."""
    doomed = checkpoint.with_name(f"{_STAGING}deleted-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
