"""What remains when the watch fires: files for people, the verdict, and checkpoints that are no longer trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.core import atomic, devices
from lockstep.core.build import Run
from lockstep.core.checkpoint import store
from lockstep.core.checkpoint.manifest import Checkpoint
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.tensors import to_cpu
from lockstep.core.errors import WatchError
from lockstep.watch.verdict import Verdict

VERDICT, CHECKED = "verdict.json", "checked.json"


def write(run: Run, step: int, micro_batch: MicroBatch | None, facts: Mapping[str, Any], verdict: Verdict) -> str:
    """Write the evidence of this rank, and on rank 0 the verdict. A full disk must not hide the verdict.

    Returns:
        a sentence on where it is, or that it is missing; empty if the run has no folder.
    """
    if run.folder == Path():
        return ""
    folder = run.folder / "watch" / f"step-{step}"
    evidence = {
        "facts": dict(facts),
        "inputs": None if micro_batch is None else to_cpu(micro_batch.collated),
        "indices": () if micro_batch is None else micro_batch.indices,
        "seed": run.state.seed,
        "step": step,
        "rank": run.world.rank,
        "host": socket.gethostname(),
        "device": device_name(run.world.device),
        "versions": {"lockstep": lockstep.__version__, "torch": torch.__version__},
    }
    where = f". The evidence could not be written into {folder}"
    with contextlib.suppress(OSError, RuntimeError, AttributeError, TypeError):  # pickle may not support the inputs
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{run.world.rank}.pt"
        unfinished = path.with_suffix(".unfinished")
        torch.save(evidence, unfinished)
        os.replace(unfinished, path)
        where = f". The evidence is in {folder}"
    if run.world.rank == 0:
        with contextlib.suppress(OSError):
            text = json.dumps({"step": step, **dataclasses.asdict(verdict)}, indent=2)
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(folder.parent / VERDICT, text)
    return where


def note_checked(run: Run) -> None:
    """Write which state of a run a check has seen. Checkpoints that were saved before lack it. Called on rank 0."""
    with contextlib.suppress(OSError):
        (run.folder / "watch").mkdir(exist_ok=True)
        atomic.write_text(run.folder / "watch" / CHECKED, json.dumps({"step": run.checked_step}))


def checked_step(run_dir: Path, checkpoint: Checkpoint | None) -> int | None:
    """The last step whose state a check has seen, of a run that resumes from a checkpoint. None: there is none."""
    if checkpoint is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = int(json.loads((run_dir / "watch" / CHECKED).read_text())["step"])
        return max(checkpoint.checked_step, min(noted, checkpoint.step))
    return checkpoint.checked_step if checkpoint.checked_step >= 0 else None


def so_far(run: Run, passed: Sequence[int], now: int) -> str:
    """A sentence on what earlier checks have compared.

    Args:
        now: the step whose check has failed.
        passed: the steps of the checks that have passed in this process.
    """
    step = run.checked_step
    if step is None:
        return "No earlier check counts: the fault may be older" if passed else "No earlier check had passed"
    counting = [run.first_step, *(one for one in passed if one <= step + 1)]
    if len(counting) == 1:
        return f"The last check that counts is of an earlier start: it saw the state after step {step}"
    before, last = counting[-2:]
    steps = f"step {last - 1}" if before + 2 == last else f"steps {before + 1} to {last - 1}"
    gap = f". No check looked at the gradients of {steps}" if before + 1 < last else ""
    of_last = "of the state before this step" if last == now else f"that of step {last}"
    return f"The last check that counts is {of_last}{gap}"


def device_name(device: torch.device) -> str:
    """A device for people, with its model and hardware identity, if it has them."""
    found = devices.of(device)
    return " ".join(filter(None, (str(device), found.name(), found.identity())))


@contextlib.contextmanager
def setting_aside(run: Run) -> Generator[None, None, None]:
    """Around a training: if the watch ends it, checkpoints that no check has seen are renamed `suspect-...`.

    It encloses the last save, which may still be in progress when the watch fires.
    """
    try:
        yield
    except WatchError as error:
        error.remedy = f"{error.remedy}. {run.world.on_rank0(partial(_set_aside, run))}"
        raise


def _set_aside(run: Run) -> str:
    """Rename the checkpoints that no check has seen. Returns a sentence on what is left."""
    if run.held is not None:
        run.held.check()
    aside = [_renamed(one.path) for one in suspects(run)]
    text = f"Set aside, because no check passed after them: {', '.join(reversed(aside))}. " if aside else ""
    left = next(iter(store.listed(run.folder / "checkpoints")), None)
    if left is None:
        return f"{text}No checkpoint is left: the same command starts from the beginning"
    return f"{text}The same command resumes from the last checked checkpoint, of step {left.step}"


def _renamed(checkpoint: Path) -> str:
    """Rename a checkpoint so that no run resumes from it. Returns the name."""
    kept = checkpoint.with_name(f"suspect-{checkpoint.name}")
    with contextlib.suppress(OSError):
        atomic.remove(kept)  # from an earlier suspicion
    checkpoint.rename(kept)
    atomic.sync(checkpoint.parent)
    return kept.name


def suspects(run: Run) -> list[Checkpoint]:
    """The checkpoints after the last check that counts, the newest first."""
    checked = -1 if run.checked_step is None else run.checked_step
    return [one for one in store.listed(run.folder / "checkpoints") if one.step > checked]
