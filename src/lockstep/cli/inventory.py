"""`lockstep checkpoints`: lists the checkpoints of a run, checks their files, and deletes those that need not stay."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.checkpoint import store
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.watch import evidence


def show(folder: Path, retention: CheckpointConfig, check: bool, prune: bool) -> bool:
    """Print a line for each checkpoint, newest first.

    Args:
        check: compare every file with its checksum.
        prune: check, then delete what `retention` does not keep.

    Returns:
        False if a checkpoint is damaged.
    """
    checkpoints = store.listed(folder)
    faults = {checkpoint.step: store.check(checkpoint) for checkpoint in checkpoints} if check or prune else {}
    # A running training may have deleted some of them meanwhile.
    checkpoints = [one for one in checkpoints if not faults.get(one.step) or store.is_there(one.path)]
    faults = {checkpoint.step: faults[checkpoint.step] for checkpoint in checkpoints if checkpoint.step in faults}
    reasons = retention.reasons(checkpoints)
    checked = max((evidence.checked_step(folder.parent, checkpoint) or -1 for checkpoint in checkpoints), default=-1)
    for checkpoint in checkpoints:
        state = ""
        if checkpoint.step in faults:
            damage = "; ".join(faults[checkpoint.step])
            state = f"  DAMAGED: {damage}" if damage else "  valid"
        if checked >= 0:
            state += "  checked" if checkpoint.step <= checked else "  not checked yet"
        print(f"{_line(checkpoint)}  kept: {', '.join(reasons.get(checkpoint.step, ['no']))}{state}")
    best = retention.best_of(checkpoints)
    if best is not None and retention.best is not None:
        print(f"best: {best.path.name}, {' '.join(retention.best)} {best.metrics[retention.best[1]]:.4g}")
    for path in sorted(folder.glob("suspect-step-*")):
        print(f"{path.name}  SET ASIDE by the watch: no check passed after it, and no run resumes from it")
    unreadable = store.unreadable(folder)
    for complaint in unreadable:
        print(complaint.replace(": ", "  DAMAGED: ", 1))
    if not checkpoints and not unreadable:
        print(f"no checkpoint in {folder}")
    if prune:

        def is_valid(checkpoint: Checkpoint) -> bool:
            if checkpoint.step not in faults:  # it was saved meanwhile
                faults[checkpoint.step] = store.check(checkpoint)
            return not faults[checkpoint.step]

        for path in store.prune(folder, retention, valid=is_valid):
            print(f"deleted {path.name}")
    return not unreadable and not any(faults[checkpoint.step] for checkpoint in checkpoints if faults)


def _line(checkpoint: Checkpoint) -> str:
    hidden = ("/samples", "/bad", "/of_samples")
    shown = {name: value for name, value in checkpoint.metrics.items() if not name.endswith(hidden)}
    metrics = "".join(f"  {name} {value:.4g}" for name, value in shown.items())
    saved_at = checkpoint.manifest.get("saved_at", "")
    return f"{checkpoint.path.name}  {checkpoint.size / 2**20:,.1f} MiB  {saved_at}{metrics}"
