"""The folder of checkpoints: commits, lists, checks and deletes them. A checkpoint is there whole or not at all.

checkpoints/step-00000123/          one share per rank, .metadata, index.json, manifest.json
checkpoints/.staging-step-00000123/ being written, or left by a process that was killed while it wrote

The manifest is written last: a directory without a valid manifest is no checkpoint. The metrics of an evaluation at the
same step are added to the manifest later.
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
    """A directory with a manifest. `check` compares its files with the manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Step after which the state was saved."""
        return int(self.manifest["step"])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(about["bytes"] for about in self.manifest["files"].values())

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the evaluation at this step; empty if there was none, or it has not ended yet."""
        return dict(self.manifest["metrics"])

    @cached_property
    def _contents(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / INDEX).read_text())
        return content

    @property
    def index(self) -> files.Index:
        """The place of each tensor, by name."""
        return dict(self._contents["tensors"])

    @property
    def values(self) -> dict[str, Any]:
        """State that is not a tensor, by name."""
        return dict(self._contents["values"])


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest, the best by a metric, and those of every n-th step."""

    last: int = 3
    """How many of the newest stay."""
    best: tuple[str, str] | None = None
    """`min` or `max`, and the name of the metric."""
    every_steps: int | None = None
    """Checkpoints stay whose step is a multiple of this number."""

    def reasons(self, checkpoints: Iterable[Checkpoint]) -> dict[int, list[str]]:
        """Why a checkpoint stays, by step. Steps whose checkpoint may be deleted are left out."""
        by_step = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
        reasons: dict[int, list[str]] = {}
        for checkpoint in by_step[-self.last :]:
            reasons.setdefault(checkpoint.step, []).append("last")
        best = self.best_of(by_step)
        if best is not None:
            reasons.setdefault(best.step, []).append("best")
        for checkpoint in by_step if self.every_steps else ():
            if checkpoint.step % (self.every_steps or 1) == 0:
                reasons.setdefault(checkpoint.step, []).append(f"every {self.every_steps}")
        return reasons

    def best_of(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
        """The best by the metric, and the latest of equal ones. None: no metric was chosen, or none was evaluated."""
        if self.best is None:
            return None
        sign, metric = (-1 if self.best[0] == "min" else 1), self.best[1]
        rated = [one for one in checkpoints if not math.isnan(one.metrics.get(metric, math.nan))]
        return max(rated, key=lambda one: (sign * one.metrics[metric], one.step), default=None)


def staging(folder: Path, step: int) -> Path:
    """The folder that the ranks write the checkpoint of `step` into, before it is committed."""
    return folder / f"{_STAGING}step-{step:08d}"


def commit(
    folder: Path, step: int, manifest: Mapping[str, Any], *, index: files.Index, values: Mapping[str, Any]
) -> Checkpoint:
    """Turn the staging folder, into which all ranks have written, into the checkpoint `folder/step-XXXXXXXX`.

    Writes the index and the manifest, then renames the folder.

    Raises:
        OSError: the checkpoint cannot be written, or the share of a rank is not visible here.
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
        remove(final)  # damaged: the run would have gone on from it otherwise
    staged.rename(final)
    fail_at("after-rename", step)
    atomic.sync(folder)
    return Checkpoint(final, content)


def add_metrics(folder: Path, step: int, metrics: Mapping[str, float]) -> bool:
    """Add metrics to the manifest of a checkpoint. A kill at any instant leaves the old manifest or the new one.

    Returns:
        False if there is no checkpoint of `step`.

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
    """All checkpoints with a valid manifest, newest first. Their other files are not checked."""
    checkpoints = [
        Checkpoint(path, manifest) for path in _folders(folder) if isinstance(manifest := _manifest(path), dict)
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def unreadable(folder: Path) -> list[str]:
    """A complaint for each manifest that is damaged."""
    return [f"{path.name}: {fault}" for path in _folders(folder) if isinstance(fault := _manifest(path), str)]


def _folders(folder: Path) -> list[Path]:
    """Directories with a manifest file, the newest last."""
    named = [
        path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and (path / MANIFEST).exists()
    ]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def _signed(content: Mapping[str, Any]) -> str:
    """A manifest as text, with a checksum of the manifest itself."""
    return json.dumps({"crc32": zlib.crc32(json.dumps(content).encode()), "checkpoint": content})


def _manifest(path: Path) -> dict[str, Any] | str | None:
    """The content of a manifest; text on what is wrong with it; or None if there is no manifest."""
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
    """Compare the files of a checkpoint with its manifest.

    Args:
        part, parts: check only every `parts`-th file, from number `part` on.

    Returns:
        what is wrong; empty if all is right.
    """
    faults = []
    for name, about in sorted(checkpoint.manifest["files"].items())[part::parts]:
        path = checkpoint.path / name
        try:
            actual = files.checksum(path)
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
            continue
        if actual["bytes"] != about["bytes"]:
            faults.append(f"{name} has {actual['bytes']} bytes, not {about['bytes']}")
        elif actual != about:
            faults.append(f"{name} differs from its checksum")
    return faults


def check_together(checkpoint: Checkpoint, world: World) -> list[str]:
    """As `check`, on every rank; each rank checks a part of the files."""
    return _of_all_ranks(check(checkpoint, world.rank, world.size), world)


def _of_all_ranks(faults: list[str], world: World) -> list[str]:
    return list(dict.fromkeys(fault for rank in world.broadcast(world.gather(faults)) for fault in rank))


def newest(folder: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is not damaged, the same on every rank. Each rank checks a part of the files.

    Returns:
        the checkpoint, or None if there is none; and messages on damaged checkpoints that were passed over.

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
        faults = _of_all_ranks(mine, world)
        if not faults:
            return candidate, [f"passed over a damaged checkpoint: {complaint}" for complaint in complaints]
        complaints.append(f"{name}: {'; '.join(faults)}")
    if complaints:
        raise CheckpointError(
            "\n".join(complaints), where=str(folder), remedy="no valid checkpoint is left; start anew with --fresh"
        )
    return None, []


def prune(
    folder: Path, retention: Retention, valid: Callable[[Checkpoint], bool] | None = None, newest: int | None = None
) -> list[Path]:
    """Delete the checkpoints that `retention` does not keep.

    Args:
        valid: whether a checkpoint is not damaged. The newest valid checkpoint then stays in any case, and if none is
            valid, all stay. None: do not ask.
        newest: step of the newest checkpoint that counts. Later checkpoints are damaged, stay, and must not take the
            place of good ones. None: all count.

    Returns:
        the deleted folders.
    """
    checkpoints = [checkpoint for checkpoint in listed(folder) if newest is None or checkpoint.step <= newest]
    keep = set(retention.reasons(checkpoints))
    if valid is not None:
        newest_valid = next((checkpoint.step for checkpoint in checkpoints if valid(checkpoint)), None)
        if newest_valid is None:
            return []
        keep.add(newest_valid)
    deleted = [checkpoint.path for checkpoint in checkpoints if checkpoint.step not in keep]
    for path in deleted:
        remove(path)
    return deleted


def clear_leftovers(folder: Path) -> list[Path]:
    """Delete what killed processes left behind. Call it only while no checkpoint is being written."""
    leftovers = sorted(folder.glob(f"{_STAGING}*"))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, so that a kill in between leaves no half of it under its name."""
    doomed = checkpoint.with_name(f"{_STAGING}deleted-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
