"""`lockstep checkpoints`: what a run has saved, whether it is whole, and what may go."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint import store
from lockstep.checkpoint.store import Checkpoint, Retention
from lockstep.config import CheckpointConfig


def retention(keep: CheckpointConfig) -> Retention:
    """What the config keeps."""
    best = keep.keep_best.split() if keep.keep_best else None
    return Retention(keep.keep_last, (best[0], best[1]) if best else None, keep.keep_every_steps)


def show(run_dir: Path, keep: CheckpointConfig, check: bool, prune: bool) -> bool:
    """Print one line per checkpoint, newest first; False where `check` found damage. `prune` deletes what `keep` does not keep."""
    folder = run_dir / "checkpoints"
    rules = retention(keep)
    found = store.listed(folder)
    reasons = rules.reasons(found)
    faults = {one.step: store.check(one) for one in found} if check or prune else {}
    for one in found:
        state = "" if one.step not in faults else "  valid" if not faults[one.step] else f"  DAMAGED: {'; '.join(faults[one.step])}"
        print(f"{_line(one)}  kept: {', '.join(reasons.get(one.step, ['no']))}{state}")
    broken = store.unreadable(folder)
    for path in broken:
        print(f"{path.name}  DAMAGED: no readable {store.MANIFEST}")
    if not found and not broken:
        print(f"no checkpoint in {folder}")
    if prune:
        for path in store.prune(folder, rules, valid=lambda one: not faults[one.step]):
            print(f"deleted {path.name}")
    return not broken and not any(faults.values())


def _line(one: Checkpoint) -> str:
    metrics = "".join(f"  {name} {value:.4g}" for name, value in one.metrics.items() if name not in ("eval/samples", "eval/bad"))
    return f"{one.path.name}  {one.size / 2**20:,.1f} MiB  {one.manifest.get('saved_at', '')}{metrics}"
