"""Writes a bundle: repeats a step of a run, and keeps what it needs and what it computed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

import lockstep
from lockstep.core import run_folder
from lockstep.core.build import Run
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.tensors import map_tensors
from lockstep.core.errors import number_of
from lockstep.core.parallel import equal_bits
from lockstep.core.plugins import package_of
from lockstep.trainer import source_code
from lockstep.trainer.trainer import Trainer
from lockstep.watch import replay_report
from lockstep.watch.replay_report import ReplayReport, Wants
from lockstep_lab.bundle import file, pickled
from lockstep_lab.bundle.recorded import StepRecorder, by_shard

_NAMED_FILE = re.compile(r"(.+\.py):(\w+)")
FIELDS = ("indices", "epoch", "weights", "filler", "bad", "words")
"""Of a micro-batch, besides the batch itself."""


def settled(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """A config with which every rank holds the whole model, and notes on what that changes."""
    parallel, notes = config.parallel, []
    if parallel.strategy == "fsdp" and parallel.virtual_ranks is None:
        notes.append("note: the run trained with fsdp, and the bundle is made with ddp: equal to rounding")
    if parallel.tensor > 1:
        notes.append(f"note: the run trained with parallel.tensor={parallel.tensor}, and the bundle is made without")
    changed = parallel.model_copy(update={"strategy": "ddp", "tensor": 1})
    # Recomputed activations are the same bits, and their blocks cannot be pickled.
    compute = config.compute.model_copy(update={"activation_checkpointing": False})
    return config.model_copy(update={"parallel": changed, "compute": compute}), notes


def make(config: RunConfig, run_dir: Path, step: int, out: Path, *, tell: Callable[[str], None]) -> ReplayReport:
    """Repeat a step of a run, and write it as a bundle. All ranks call it.

    Args:
        config: of `settled`.
        tell: reports what comes next.

    Raises:
        LockstepError: the run has no such step, it cannot be repeated, or the file cannot be written.
    """
    with Trainer(config, run_dir=run_dir, quiet=True).replaying(step) as (run, after), _temporary(run, out) as content:
        recorder, about = StepRecorder(run), _about(run, step, config)

        @contextlib.contextmanager
        def inside(micro_batches: list[MicroBatch]) -> Generator[None, None, None]:
            about.update(_state(run, micro_batches, content))
            with recorder.inside(micro_batches):
                yield

        report = replay_report.make(run, step, Wants(), after, tell=tell, inside=inside)
        last = report.steps[-1]
        recorded = recorder.end(last.by_head, last.grad_norm)
        whole = report.logged_from == report.logged.get("step") == step
        about |= {
            "recorded": dataclasses.asdict(recorded),
            "logged": {"loss": report.logged["train/loss"]} if whole else {},
            "units": last.units,
        }

        def write() -> None:
            changed, sources = _sources(config)
            about["config"] = changed
            content.seek(0)
            file.write(out, about, sources, lambda into: shutil.copyfileobj(content, into, 1 << 20))

        run.world.on_rank0(write)
    return report


@contextlib.contextmanager
def _temporary(run: Run, out: Path) -> Generator[IO[bytes], None, None]:
    """On rank 0, a file on the disk of the bundle; it disappears at the end."""
    if run.world.rank:
        yield io.BytesIO()  # nothing is written
        return
    with tempfile.TemporaryFile(dir=out.parent) as content:
        yield content


def _about(run: Run, step: int, config: RunConfig) -> dict[str, Any]:
    recorded = run_folder.recorded(run.folder)
    device = run.world.device
    return {
        "run": config.name,
        "step": step,
        "trained_on": recorded.get("world"),
        "ranks": run.world.data_size,
        "virtual_ranks": run.world.virtual_ranks,
        "versions": versions(),
        "device": device.type,
        "kind": equal_bits.kind(device),
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "steps_per_epoch": run.plan.steps_per_epoch,
        "stop": run.stop,
        "blocks": run.blocks,
    }


def versions() -> dict[str, str]:
    """What decides the bits of a step, besides the device."""
    return {
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _state(run: Run, micro_batches: list[MicroBatch], content: IO[bytes]) -> dict[str, Any]:
    """The state before the step: its tensors go into `content`. All ranks call it."""
    state, world = run.state, run.world
    averages = state.averages.tensors if state.averages else None
    tensors, values = checkpoint_state.capture(run.model, state.optimizer, averages)
    own = [
        (shard, {**_fields(one), "collated": map_tensors(one.collated, _own)})
        for shard, _, one in by_shard(run, micro_batches)
    ]
    batches = world.gather(own)

    def write() -> list[str]:
        assert batches is not None
        ordered = [batch for of_rank in batches for batch in of_rank]
        with pickled.without_data(run.task) as left:
            pickled.save(content, {"model": run.model, "tensors": tensors, "micro_batches": ordered}, run.task)
        return left

    return {
        "left_out": world.on_rank0(write),
        "values": values,
        "samples": run.plan.samples(state.step),
        "factor": state.schedule(state.step - state.skipped),
        "skipped": state.skipped,
        "loss_scale": state.precision.state(),
        "seed": state.seed,
    }


def _fields(micro_batch: MicroBatch) -> dict[str, Any]:
    return {name: getattr(micro_batch, name) for name in FIELDS}


def _own(tensor: Tensor) -> Tensor:
    """A tensor whose memory has nothing else in it: a batch may be a view of the whole data set."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _sources(config: RunConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The config with paths in the bundle for the files of code that it names, and the texts of these files."""
    found: dict[str, str] = {}
    roots: dict[Path, str] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        named = _NAMED_FILE.fullmatch(value) if isinstance(value, str) else None
        if named is None or not Path(named[1]).is_file():
            return value
        path = Path(named[1]).resolve()
        root = package_of(path)[1]
        folder = roots.setdefault(root, str(len(roots)))
        found.update({os.path.normpath(f"{folder}/{name}"): text for name, text in source_code.of_file(path).items()})
        return f"{folder}/{os.path.relpath(path, root)}:{named[2]}"

    values = config.model_dump(by_alias=True)
    values["train"] |= {"parts": [], "init_from": None}
    values["log"]["writers"] = []
    return moved(values), found


def summary(out: Path) -> str:
    """Lines about a bundle, for people."""
    about = file.read_about(out)
    passes = about["recorded"]["passes"]
    samples = sum(len(one["indices"]) for one in passes)
    size = out.stat().st_size / 2**20
    lines = [
        f"written: {out}, {size:.1f} MiB: step {about['step']} of {about['run']}, {number_of(samples, 'sample')} in "
        f"{number_of(len(passes), 'micro-batch')} of {number_of(about['ranks'], 'rank')}"
    ]
    lines += [f"  left out: {what}" for what in about["left_out"]]
    return "\n".join(lines)
