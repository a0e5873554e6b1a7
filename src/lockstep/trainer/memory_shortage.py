"""What happens if the memory of a GPU does not suffice: the same for every strategy and every phase of a training.

The rank that lacks memory says so, and all ranks end. The run directory keeps half the micro-batch, with the reason,
and the next start takes it. A launcher starts the ranks again at once, from the newest checkpoint.

The first step after an interruption, such as a kill, is an exception: processes that are about to end may hold the
memory. The next start then takes the same micro-batch, and only a shortage in its first step is noted.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core import atomic, devices, run_data, run_folder
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.order import StepPlan
from lockstep.core.errors import MemoryShortage, TrainingError
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.launched import INTERRUPTED
from lockstep.core.parallel.world import World


@dataclass(frozen=True)
class Fitting:
    """The largest micro-batches that may fit, in samples: as the config asks, or smaller if these did not fit."""

    training: int
    evaluation: int


def fitting(folder: Path, config: RunConfig, world: World) -> Fitting:
    """The sizes that the config asks for, or smaller sizes that an earlier start noted. All ranks call it."""
    return world.on_rank0(lambda: _fitting(folder, config, world))


@contextlib.contextmanager
def noted(
    folder: Path, config: RunConfig, world: World, plan: StepPlan | None = None, *, begins_again: bool = True
) -> Generator[None, None, None]:
    """Around a training or an evaluation. If memory does not suffice, note in `folder` what the next start takes.

    Args:
        plan: of the training. None: there is only an evaluation.
        begins_again: whether the launcher may start the ranks again.

    Raises:
        MemoryShortage: on the rank whose memory did not suffice. Weights may be half updated.
        TrainingError: a micro-batch of one sample does not fit.
    """
    evaluated_at_once = _fitting(folder, config, world).evaluation  # now: another rank may note half of it
    try:
        yield
    except Exception as error:
        if not config.compute.halve_on_oom or not devices.of(world.device).is_shortage(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold activations
        reason = (str(error) or type(error).__name__).splitlines()[0]
        is_evaluating = plan is None or world.heartbeat.phase == Phase.EVALUATING
        step = max(0, world.heartbeat.step)  # steps that are done
        size = evaluated_at_once if plan is None or is_evaluating else plan.micro_batch_at(step)
        where = f"rank {world.rank}" if is_evaluating else f"step {step + 1}, rank {world.rank}"
        if os.environ.get(INTERRUPTED) == "1" and world.heartbeat.phase <= Phase.FIRST_STEP and begins_again:
            raise MemoryShortage(
                f"out of memory in the first step after a restart: {reason}",
                where=where,
                remedy="processes of the start before may have held memory, so the next start takes the same sizes",
            ) from None
        explained = _explained(reason, where, folder, config, world, size=size, is_evaluating=is_evaluating)
        explained.retryable = explained.retryable and begins_again
        raise explained from None


def _explained(
    reason: str, where: str, folder: Path, config: RunConfig, world: World, *, size: int, is_evaluating: bool
) -> TrainingError:
    """The error about a shortage with micro-batches of `size` samples, after the note of half the size."""
    key, what = ("evaluation", "in an evaluation ") if is_evaluating else ("micro", "")
    if size == 1:
        return TrainingError(
            f"a micro-batch of one sample does not fit into memory: {reason}",
            where=where,
            remedy="use more ranks with parallel.strategy=fsdp, compute.activation_checkpointing=true, "
            "or precision=bf16",
        )
    half = -(-size // 2)
    note = _key(config, world) | _read(folder, config, world) | {key: half, "why": f"{where}: {reason}"}
    try:
        staging = folder / f".{run_folder.MICRO_BATCH}.{world.rank}"  # several ranks may write at the same time
        with atomic.staged_file(folder / run_folder.MICRO_BATCH, staging) as file:
            file.write_text(json.dumps(note), encoding="utf-8")
    except OSError as error:
        return TrainingError(
            f"out of memory {what}with micro-batches of {size}: {reason}",
            where=where,
            remedy=f"set batch.micro={half}; {folder} cannot keep this size ({error.strerror})",
        )
    return MemoryShortage(
        f"out of memory {what}with micro-batches of {size}: {reason}",
        where=where,
        remedy=f"the next start takes micro-batches of {half}",
    )


def _fitting(folder: Path, config: RunConfig, world: World) -> Fitting:
    note, most = _read(folder, config, world), run_data.asked_micro_batches(config, world)
    asked = Fitting(max(size for _, size in most), run_data.evaluated_at_once(config))
    return Fitting(
        min(asked.training, max(1, note.get("micro", asked.training))),
        min(asked.evaluation, max(1, note.get("evaluation", asked.evaluation))),
    )


def _read(folder: Path, config: RunConfig, world: World) -> dict[str, Any]:
    """The note for these sizes and this number of ranks. Empty: there is none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no dict
        note = json.loads((folder / run_folder.MICRO_BATCH).read_text(encoding="utf-8"))
        sizes_are_numbers = all(isinstance(note.get(key, 1), int) for key in ("micro", "evaluation"))
        if note | _key(config, world) == note and sizes_are_numbers:
            return dict(note)
    return {}


def _key(config: RunConfig, world: World) -> dict[str, Any]:
    return {"asked": run_data.asked_micro_batches(config, world), "world": world.virtual_ranks or world.size}
