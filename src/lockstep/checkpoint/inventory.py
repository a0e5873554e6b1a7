"""`lockstep checkpoints`: what a run has saved, whether it is whole, and what may go."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint import store
from lockstep.checkpoint.store import Checkpoint, Retention


def show(folder: Path, retention: Retention, check: bool, prune: bool) -> bool:
    """Print one line per checkpoint, newest first; False where `check` found damage. `prune` deletes what `retention` does not keep."""
    found = store.listed(folder)
    reasons = retention.reasons(found)
    faults = {one.step: store.check(one) for one in found} if check or prune else {}
    for one in found:
        state = (
            ""
            if one.step not in faults
            else "  valid"
            if not faults[one.step]
            else f"  DAMAGED: {'; '.join(faults[one.step])}"
        )
        print(f"{_line(one)}  kept: {', '.join(reasons.get(one.step, ['no']))}{state}")
    broken = store.unreadable(folder)
    for complaint in broken:
        print(complaint.replace(": ", "  DAMAGED: ", 1))
    if not found and not broken:
        print(f"no checkpoint in {folder}")
    if prune:
        for path in store.prune(folder, retention, valid=lambda one: not faults[one.step]):
            print(f"deleted {path.name}")
    return not broken and not any(faults.values())


def _line(one: Checkpoint) -> str:
    metrics = "".join(
        f"  {name} {value:.4g}" for name, value in one.metrics.items() if name not in ("eval/samples", "eval/bad")
    )
    return f"{one.path.name}  {one.size / 2**20:,.1f} MiB  {one.manifest.get('saved_at', '')}{metrics}"
