"""Makes the step of a bundle again, in this process, without the data set and the other ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lockstep.configs import config_file, registry
from lockstep.core import build, optimizer_class, run_model
from lockstep.core.build import Run
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.checkpoint.form import Form
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.device_copies import DeviceCopies
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import UsageError
from lockstep.core.loop import Intervals
from lockstep.core.parallel import equal_bits
from lockstep.core.parallel.world import World
from lockstep.core.schedule import Schedule
from lockstep.core.step import train_step
from lockstep.core.stopping import Stopping
from lockstep.trainer import assemble
from lockstep.updates.arrange import arrange
from lockstep.watch import replay
from lockstep_lab.bundle import file, pickled
from lockstep_lab.bundle.make import versions
from lockstep_lab.bundle.recorded import RecordedStep, StepRecorder

KEYS = ("device", "compute")
"""Keys of the config that may be changed when a step is made again."""


@dataclasses.dataclass(frozen=True)
class StepAgain:
    """A step that was made again from a bundle."""

    about: dict[str, Any]
    """The content of `bundle.json`."""
    step: RecordedStep
    notes: list[str]
    """What differs between the machine of the record and this one."""


def make(path: Path, overrides: Sequence[str] = ()) -> StepAgain:
    """Make the step of a bundle again. This runs the code in the bundle.

    Args:
        overrides: `key=value`; see `KEYS`.

    Raises:
        UsageError: the bundle is damaged, does not fit the versions here, or needs what it does not hold.
    """
    about = file.read_about(path)
    with file.unpacked(path) as (source, content):
        config = _config(about, source, overrides)
        with assemble.joined(config, Path()) as world, _as_recorded(about, world):
            _import_code(config)
            run = _run(config, about, pickled.load(str(content), world.device), world)
            recorder = StepRecorder(run)
            (made,) = replay.steps(run, about["step"], lambda _, batches: recorder.inside(batches))
            step = recorder.end(made.loss, made.grad_norm)
            return StepAgain(about, step, _notes(about, equal_bits.kind(world.device)))


def _config(about: Mapping[str, Any], source: Path, overrides: Sequence[str]) -> RunConfig:
    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [placed(item) for item in value]
        return f"{source / value}" if isinstance(value, str) and _is_file(source, value) else value

    for override in overrides:
        key = override.partition("=")[0]
        if not any(f"{key}.".startswith(f"{name}.") for name in KEYS):
            remedy = f"with a bundle, only these keys can be changed: {', '.join(KEYS)}"
            raise UsageError(f"{key} belongs to the step", where="command line", remedy=remedy)
    values = placed(about["config"])
    values["data"] |= {"train": None, "eval": None}
    return config_file.parse(values, "bundle.json", overrides, needs_task=False)


def _is_file(source: Path, value: str) -> bool:
    name, is_code, _ = value.rpartition(".py:")
    return bool(is_code) and (source / f"{name}.py").is_file()


@contextlib.contextmanager
def _as_recorded(about: Mapping[str, Any], world: World) -> Generator[None, None, None]:
    """Inside, threads and the default dtype are those of the record."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, about["default_dtype"]))
    if world.device.type == "cpu":
        torch.set_num_threads(about["threads"])
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


def _import_code(config: RunConfig) -> None:
    """Import the file of the task: pickle finds its classes by the name of the module."""
    kind = str(config.task.get("kind", ""))
    if ".py:" in kind:
        registry.maker_in_file(kind)


def _run(config: RunConfig, about: Mapping[str, Any], content: Mapping[str, Any], world: World) -> Run:
    """The run before the step, on this process only."""
    model: nn.Module = content["model"]
    task = copy.copy(content["task"])
    task.model = lambda: model
    if world.virtual_ranks is None and about["ranks"] > 1:  # this process computes one rank after the other
        world = dataclasses.replace(world, virtual_ranks=about["ranks"])
        parallel = config.parallel.model_copy(update={"virtual_ranks": about["ranks"]})
        config = config.model_copy(update={"parallel": parallel})
    done, per_epoch, stop = about["step"] - 1, about["steps_per_epoch"], about["stop"]
    built = run_model.build_model(config, task, world, steps_per_epoch=per_epoch, step=done)
    state = build.train_state(config, task, world, built, steps_per_epoch=per_epoch, stop=stop)
    state.metrics = None
    state.schedule = Schedule(own=lambda update: about["factor"])
    optimizer_class.note_settings(state.optimizer)
    optimizer_class.seed_updates(state.optimizer, config.seed, lambda: state.step, world.device)
    averages = state.averages.tensors if state.averages else None
    tensors, values = content["tensors"], about["values"]
    checkpoint_state.restore(tensors.items(), values, model, state.optimizer, averages, world.device)
    state.precision.load(about["loss_scale"])
    state.step, state.skipped = done, about["skipped"]
    copies = DeviceCopies(world.device, channels_last=config.compute.channels_last)
    copy_of = None if copies.changes_nothing else copies.begin
    batches = [MicroBatch(**fields, copy=copy_of) for _, fields in sorted(content["micro_batches"], key=_rank)]
    run = Run(
        config=config,
        task=task,
        folder=Path(),
        state=state,
        batches=_Given(batches, about["samples"], per_epoch),  # type: ignore[arg-type]
        stop=stop,
        first_step=done,
        intervals=Intervals(log=1, evaluate=0, save=0),
        blocks=built.blocks,
        fingerprint={},
        results={},
        saved_parts={},
        saved_log={},
        form=Form.of(model),
        messages=[],
        warnings=[],
        stopping=Stopping(None, None),
        update=train_step,
    )
    arrange(run)
    return run


def _rank(batch: tuple[int, Any]) -> int:
    return batch[0]


class _Given:
    """The micro-batches of one step, instead of a `StepIterator`."""

    def __init__(self, micro_batches: list[MicroBatch], samples: int, steps_per_epoch: int) -> None:
        self.plan = SimpleNamespace(samples=lambda step: samples, steps_per_epoch=steps_per_epoch)
        self._steps = (one for one in [micro_batches])

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self._steps

    def __next__(self) -> list[MicroBatch]:
        return next(self._steps)


def _notes(about: Mapping[str, Any], kind: str) -> list[str]:
    here = versions()
    notes = [
        f"warning: the bundle was written with {name} {then}, and this is {name} {here.get(name)}"
        for name, then in about["versions"].items()
        if here.get(name) != then
    ]
    if kind != about["kind"]:
        notes.append(f"note: the step was made on {about['kind']}, and again on {kind}: kernels may round differently")
    return notes
