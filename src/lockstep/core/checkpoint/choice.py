"""Chooses the checkpoint to evaluate, to predict with, to export, or to take the first weights of a different run from.

The run may continue meanwhile, and delete the chosen checkpoint. Then all ranks choose a different one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.core.checkpoint import store
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.errors import CheckpointError, UsageError
from lockstep.core.parallel.world import World

NEWEST, BEST = "newest", "best"


def read(
    folder: Path,
    world: World,
    retention: CheckpointConfig,
    wanted: str | int | None = None,
    *,
    load: Callable[[Checkpoint], object],
    where: str = "--checkpoint",
    chosen: tuple[Checkpoint, list[str]] | None = None,
) -> list[str]:
    """Choose a checkpoint as `choose` does, and load it. If it is deleted meanwhile, choose and load again.

    Args:
        load: loads a checkpoint. All ranks call it, perhaps several times. If it has collectives, they must end on
            all of their ranks if a file is gone.
        chosen: what `choose` returned, if it was called already.

    Returns:
        the lines of `choose`.

    Raises:
        CheckpointError: see `choose`; or each of several checkpoints was deleted while it was read.
    """
    for _ in range(store.ATTEMPTS):
        checkpoint, lines = chosen or choose(folder, world, retention, wanted, where=where)
        chosen, is_gone = None, False
        try:
            load(checkpoint)
        except (CheckpointError, OSError):
            is_gone = not store.is_there(checkpoint.path)
            if not is_gone:
                raise
        if not world.all_max(int(is_gone)):
            return lines
    raise store.deleted_too_often(folder)


def choose(
    folder: Path,
    world: World,
    retention: CheckpointConfig,
    wanted: str | int | None = None,
    *,
    where: str = "--checkpoint",
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that is wanted, the same on every rank. Its files are compared with their checksums.

    A checkpoint that is deleted while it is compared is not chosen.

    Args:
        folder: of the checkpoints.
        retention: says by which metric the best is chosen.
        wanted: `newest`, `best`, or a step. None: the best if the run keeps its best checkpoint, else the newest.
        where: the flag or the key that says what is wanted, for errors.

    Returns:
        the checkpoint, and lines that say which it is and which damaged checkpoints were passed over.

    Raises:
        UsageError: `wanted` is none of these, there is no checkpoint of that step, or the best is not known.
        CheckpointError: there is no checkpoint, or the wanted checkpoint is damaged.
    """
    text = str(wanted) if wanted is not None else (BEST if retention.best else NEWEST)
    if text not in (NEWEST, BEST) and not (text.isascii() and text.isdigit()):
        raise UsageError(f"{text!r} is not a checkpoint", where=where, remedy="use newest, best or a step")
    if text == NEWEST:
        return _newest(folder, world)
    for _ in range(store.ATTEMPTS):
        chosen: Checkpoint | None = world.on_rank0(
            lambda: _wanted(folder, retention, text, where=where, must_be_known=wanted is not None)
        )
        if chosen is None:  # nothing was evaluated yet
            checkpoint, lines = _newest(folder, world)
            line = f"using the newest checkpoint, of step {checkpoint.step}: none is evaluated yet"
            return checkpoint, [*lines, line]
        faults = store.check_together(chosen, world)
        if not faults:
            return chosen, [describe(chosen, retention, text, where=where)]
        if not store.is_gone(chosen.path, world):
            raise CheckpointError(
                f"the checkpoint is damaged: {'; '.join(faults)}",
                where=str(chosen.path),
                remedy="use the newest, or another step: lockstep checkpoints RUN_DIR --check lists them",
            )
    raise store.deleted_too_often(folder)


def describe(checkpoint: Checkpoint, retention: CheckpointConfig, wanted: str, *, where: str = "--checkpoint") -> str:
    """A line that says which checkpoint is used, and why."""
    if wanted != BEST or retention.best is None:
        return f"using the checkpoint of step {checkpoint.step}"
    kind, metric = retention.best
    value = f"{kind} {metric} {checkpoint.metrics[metric]:.4g}"
    newest = f"{where} {NEWEST}" if where.startswith("--") else f"{where}={NEWEST}"
    return f"using the best checkpoint, of step {checkpoint.step} ({value}); {newest} takes the newest"


def _newest(folder: Path, world: World) -> tuple[Checkpoint, list[str]]:
    checkpoint, complaints = store.newest(folder, world)
    if checkpoint is None:
        remedy = "train first, or give the run's own directory"
        raise CheckpointError("no checkpoint", where=str(folder), remedy=remedy)
    return checkpoint, complaints


def _wanted(
    folder: Path, retention: CheckpointConfig, wanted: str, *, where: str, must_be_known: bool
) -> Checkpoint | None:
    """The wanted checkpoint. None: no checkpoint is evaluated, and the best need not be known."""
    found = store.listed(folder)
    if wanted != BEST:
        by_step = {checkpoint.step: checkpoint for checkpoint in found}
        if int(wanted) in by_step:
            return by_step[int(wanted)]
        known = ", ".join(map(str, reversed(by_step))) or "none"
        raise UsageError(
            f"there is no checkpoint of step {wanted}",
            where=where,
            remedy=f"there are the steps {known}; checkpoint.keep_every_steps keeps more of them",
        )
    best = retention.best_of(found)
    if best is not None or not must_be_known:
        return best
    what, remedy = "no checkpoint is evaluated", "use the newest, or a step"
    if retention.best is None:
        what = "the run does not say by which result the best is chosen"
        remedy = "set checkpoint.keep_best (such as max eval/accuracy) when training, or use newest or a step"
    raise UsageError(what, where=f"{where} best", remedy=remedy)
