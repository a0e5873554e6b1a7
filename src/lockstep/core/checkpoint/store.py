"""The folder of checkpoints: commits, lists, checks and deletes them. A checkpoint exists completely or not at all.

checkpoints/step-00000123/          one share per rank, .metadata, index.json, manifest.json
checkpoints/.staging-step-00000123/ being written, or left by a process that was killed while it wrote

The manifest is written last, and then the directory is renamed: from this moment on, the checkpoint exists. A directory
without a valid manifest is not a checkpoint. The metrics of an evaluation at
the same step are added to the manifest later.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.checkpoint import files
from lockstep.core.checkpoint import manifest as manifests
from lockstep.core.checkpoint.manifest import INDEX, MANIFEST
from lockstep.core.checkpoint.manifest import Checkpoint as Checkpoint
from lockstep.core.checkpoint.manifest import listed as listed
from lockstep.core.checkpoint.manifest import unreadable as unreadable
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.errors import CheckpointError
from lockstep.core.parallel.faults import fail_at
from lockstep.core.parallel.nodes import NodeGroup
from lockstep.core.parallel.world import World

ATTEMPTS = 20
"""So often a reader chooses another checkpoint, if the run deletes the chosen one meanwhile."""
_STAGING = ".staging-"


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
        text.write(manifests.signed(content))
        fail_at("in-manifest", step)
        text.flush()
        os.fsync(text.fileno())
    atomic.sync(staged)
    fail_at("before-rename", step)
    if final.exists():
        remove(final)  # damaged: otherwise the run would have resumed from it
    staged.rename(final)
    fail_at("after-rename", step)
    atomic.sync(folder)
    return Checkpoint(final, content)


def add_metrics(folder: Path, step: int, metrics: Mapping[str, float], **more: Any) -> bool:
    """Add metrics to the manifest of a checkpoint, and `more` by key.

    A kill at any instant leaves the old manifest or the new one.

    Returns:
        False if there is no checkpoint of `step`.

    Raises:
        OSError: the manifest cannot be written.
    """
    path, staging = folder / f"step-{step:08d}", folder / f"{_STAGING}{MANIFEST}-{step:08d}"
    content = manifests.read(path)
    if not isinstance(content, dict):
        return False
    fail_at("before-metrics", step)
    with atomic.staged_file(path / MANIFEST, staging), staging.open("w") as text:
        text.write(manifests.signed({**content, "metrics": dict(metrics), **more}))
        fail_at("in-metrics", step)
    atomic.sync(path)
    return True


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


def is_there(path: Path) -> bool:
    """False for a checkpoint that was deleted."""
    return (path / MANIFEST).exists()


def is_gone(path: Path, world: World) -> bool:
    """True on all ranks if one of them no longer sees a checkpoint. All ranks call it."""
    return bool(world.all_max(int(not is_there(path))))


def deleted_too_often(folder: Path) -> CheckpointError:
    """The error if each checkpoint that was chosen was deleted before it was read."""
    return CheckpointError(
        f"each of {ATTEMPTS} checkpoints was deleted while it was read: the run saves and deletes them too quickly",
        where=str(folder),
        remedy="raise checkpoint.keep_last or checkpoint.every_steps of the run, or read it when it has ended",
    )


def newest(folder: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is not damaged, the same on every rank. Each rank checks a part of the files.

    The checkpoints are listed again if one is deleted while it is checked.

    Returns:
        the checkpoint, or None if there is none; and messages on damaged checkpoints that were passed over.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; or they are deleted too quickly to be checked.
    """
    for _ in range(ATTEMPTS):
        complaints: list[str] = []
        names: list[str] = world.broadcast([path.name for path in reversed(manifests.folders(folder))])
        for name in names:
            manifest = manifests.read(folder / name)
            if isinstance(manifest, dict):
                candidate = Checkpoint(folder / name, manifest)
                mine = check(candidate, world.rank, world.size)
            else:
                mine = [manifest or f"{MANIFEST} is not there"]
            faults = _of_all_ranks(mine, world)
            if not faults:
                return candidate, [f"passed over a damaged checkpoint: {complaint}" for complaint in complaints]
            if is_gone(folder / name, world):
                break
            complaints.append(f"{name}: {'; '.join(faults)}")
        else:
            if complaints:
                remedy = "no valid checkpoint is left; start again with --fresh"
                raise CheckpointError("\n".join(complaints), where=str(folder), remedy=remedy)
            return None, []
    raise deleted_too_often(folder)


def read_contents(checkpoint: Checkpoint, node: NodeGroup | None) -> None:
    """Read the index of a checkpoint once for all ranks of this node. With many ranks it is large.

    Args:
        node: the ranks of this node, if there are several. They all call this.

    Raises:
        CheckpointError: the index cannot be read.
    """
    if node is None:
        return
    size = int(checkpoint.manifest["files"][INDEX]["bytes"])

    def read(buffer: memoryview) -> None:
        try:
            buffer[:] = (checkpoint.path / INDEX).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: it has a different length
            raise CheckpointError(f"{INDEX} cannot be read: {error}", where=str(checkpoint.path)) from error

    content = json.loads(bytes(node.pass_on(size, read)))
    vars(checkpoint)["contents"] = content  # what the cached property would otherwise read from the disk


def prune(
    folder: Path,
    retention: CheckpointConfig,
    valid: Callable[[Checkpoint], bool] | None = None,
    newest: int | None = None,
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
        with contextlib.suppress(OSError):
            atomic.remove(path)
    return leftovers


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, so that a kill in between leaves no half of it under its name.

    It may be gone already. Of a link to a checkpoint only the link is deleted.
    """
    doomed = checkpoint.with_name(f"{_STAGING}deleted-{checkpoint.name}")
    with contextlib.suppress(OSError):
        atomic.remove(doomed)
    with contextlib.suppress(FileNotFoundError):
        checkpoint.rename(doomed)
    with contextlib.suppress(OSError):  # the rest is a leftover, which the next start deletes
        atomic.remove(doomed)
