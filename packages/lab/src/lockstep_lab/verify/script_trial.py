"""One short run of a user's script on this rank, with a record of each step."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lockstep.core import devices
from lockstep.core.data.dataset import forward
from lockstep.core.data.randomness import restored_generators
from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.parallel.sharded_tensor import gather_on_rank0
from lockstep.core.part import Part, Training
from lockstep.parts.digest import Digest, digest_of_batch
from lockstep.trainer import user_exit, user_trial
from lockstep.trainer.user_loop import Loop
from lockstep.trainer.user_loop_task import LoopTask
from lockstep_lab.verify.comparable_task import (
    DropoutDisabled,
    batch_norm_modules,
    disable_dropout,
    freeze_statistics,
)
from lockstep_lab.verify.reference.data import numbers, read
from lockstep_lab.verify.step_operations import RandomOperations

FINAL = "verified.pt"
"""The file of the final weights, in the folder of a run."""
_NUMBERS = 64
"""Size of the sketch of a tensor."""
_SAMPLES = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ScriptRun:
    """A run of the script to make."""

    script: str
    arguments: tuple[str, ...]
    folder: str
    """Its run directory. In the directory of an earlier run, it resumes that run."""
    steps: int
    """The step after which the run ends."""
    micro: int | None = None
    """A different largest micro-batch."""
    strategy: str | None = None
    """Another strategy."""
    device: str | None = None
    exact: bool = False
    """No dropout, BatchNorm with fixed statistics, and fp32: so that runs with different splits can be compared."""
    reverse: bool = False
    """The samples of each micro-batch in reversed order: the same sums, rounded differently."""
    notice: bool = False
    """Record where the body of the loop draws random numbers."""
    save_every: int = 0
    """Steps between checkpoints. 0: only after the last step."""
    kill: tuple[int, int] | None = None
    """(rank, step): that rank gets SIGKILL after that step."""


@dataclass
class ScriptRecording:
    """What one rank observed of a run."""

    losses: dict[int, float] = field(default_factory=dict)
    """The mean loss of the global batch, by step from 1."""
    sketches: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """A sketch of each parameter, by step; see `sketch`. The first step of the process has the initial one. Empty on
    ranks other than 0 if parameters are sharded."""
    samples: list[Digest] = field(default_factory=list)
    """Digests of some training samples, spread over the data."""
    draws: list[str] = field(default_factory=list)
    """Where the body of the loop drew random numbers."""
    batch_norms: list[str] = field(default_factory=list)
    """Names of the BatchNorm modules."""
    micro: int = 0
    """Size of the largest micro-batch."""
    epsilon: float = 0.0
    """Relative rounding of the coarsest number format of the parameters and of the forward pass."""
    strategy: str = ""
    device: str = ""
    precision: str = ""
    is_sharded: bool = False
    has_ended: bool = False

    @property
    def start(self) -> int:
        """Steps that were done when the process started."""
        return min(self.sketches, default=0)


def run_script(run: ScriptRun) -> ScriptRecording:
    """Run the script on this rank until its loop has made its steps.

    Raises:
        UsageError: it makes no `Loop`, or ends before a step.
        LockstepError: it ends with an exit code.
    """
    trial = ScriptTrial(run)
    user_trial.begin(trial)
    try:
        with contextlib.ExitStack() as stack:
            if run.exact:
                stack.enter_context(DropoutDisabled())
            if run.notice:
                stack.enter_context(trial.random)
            user_exit.run_script([run.script, *run.arguments])
    except SystemExit as ended:
        if ended.code not in (None, 0):
            traceback.print_exc()
            raise LockstepError(f"the script ended with exit code {ended.code}", where=run.script) from None
    finally:
        user_trial.end()
    if trial.loop is None:
        remedy = "`lockstep init --from plain` shows how a training loop uses lockstep.Loop"
        raise UsageError("it made no lockstep.Loop", where=run.script, remedy=remedy)
    recording = trial.recording
    if not recording.has_ended or not recording.losses:
        remedy = "write `for step in loop:`, and let it run at least one step"
        raise UsageError("its Loop made no step", where=run.script, remedy=remedy)
    recording.draws = list(dict.fromkeys(trial.random.places))
    return recording


@final
class ScriptTrial(user_trial.LoopTrial[Loop]):
    """The part of a run on this rank."""

    def __init__(self, run: ScriptRun) -> None:
        self.run, self.folder, self.recording = run, Path(run.folder), ScriptRecording()
        self.loop: Loop | None = None
        self.parts = (_Recorder(self),)
        self.random = RandomOperations(self._is_in_body)

    def _is_in_body(self) -> bool:
        """True from the start of a step to its update. Evaluations and the reading of samples are outside."""
        step = None if self.loop is None else self.loop._step
        return step is not None and step.result is None

    def changed(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        run = self.run
        more: dict[str, dict[str, Any]] = {
            "log": {"every_steps": 1, "writers": ["json_lines"], "pictures": 0},
            "checkpoint": {"every_steps": run.save_every, "every_minutes": None, "mode": "sync", "keep_best": None},
            "watch": {"every": 0},
            "parallel": {"timeout_s": _TIMEOUT_S} | ({"strategy": run.strategy} if run.strategy else {}),
            "batch": {"micro": run.micro} if run.micro else {},
        }
        if devices.gpus() and run.device != "cpu":
            more["compute"] = {"deterministic": True}
        single = {"device": run.device} if run.device else {}
        single |= {"precision": "fp32"} if run.exact else {}
        return {**keys, **single, **{name: {**keys.get(name, {}), **values} for name, values in more.items()}}

    def prepare(self, task: LoopTask) -> None:
        model, recording = task.model(), self.recording
        recording.batch_norms = [name for name, one in model.named_modules() if one in batch_norm_modules(one)]
        if self.run.exact:
            disable_dropout(model)
            for norm in batch_norm_modules(model):
                freeze_statistics(norm)
        if self.run.reverse:
            task.collate = partial(_reversed, task.collate)  # type: ignore[method-assign]

    def joined(self, loop: Loop) -> None:
        self.loop = loop
        run, recording = loop._run, self.recording
        config, world = run.config, run.world
        formats = [parameter.dtype for parameter in run.model.parameters() if parameter.is_floating_point()]
        formats += {"bf16": [torch.bfloat16], "fp16": [torch.float16]}.get(config.precision, [])
        recording.epsilon = max((float(torch.finfo(one).eps) for one in formats), default=0.0)
        recording.precision, recording.device = config.precision, devices.of(world.device).name()
        recording.strategy = config.parallel.strategy
        recording.is_sharded = run.state.strategy.is_sharded
        data: Any = loop._task.train_data()
        if forward(data) is None:
            length = len(data)
            indices = sorted({number * length // _SAMPLES for number in range(_SAMPLES)}) if length else []
            with restored_generators(world.device):
                samples = read(loop._task, data, indices, epoch=0, training=True, seed=config.seed, skip=True)
            recording.samples = [digest_of_batch(sample) for sample in samples]

    def note_step(self, step: int, loss: float | None) -> None:
        """Record the state after a step. All ranks call it."""
        assert self.loop is not None
        if loss is not None:
            self.recording.losses[step] = loss
        whole = self._whole()
        self.recording.sketches[step] = {name: sketch(value) for name, value in whole.items()}
        made = self.loop._step
        if made is not None and made.result is not None:
            self.recording.micro = max([self.recording.micro, *map(len, made.result.indices)])

    def _whole(self) -> dict[str, Tensor]:
        """The whole parameters; for sharded parameters only on rank 0."""
        assert self.loop is not None
        run = self.loop._run
        if not self.recording.is_sharded:
            return {name: parameter.detach() for name, parameter in run.model.named_parameters()}
        gathered = {name: gather_on_rank0(value, run.world) for name, value in run.model.named_parameters()}
        return gathered if run.world.rank == 0 else {}

    def ended(self, loop: Loop) -> None:
        self.recording.has_ended = True
        whole = self._whole()
        if loop.is_main:
            buffers = {name: value.detach() for name, value in loop._run.model.named_buffers()}
            torch.save({"parameters": whole, "buffers": buffers}, self.folder / FINAL)


@final
class _Recorder(Part):
    """Records each step, kills this rank when it is time, and ends the training."""

    name = "verify"

    def __init__(self, trial: ScriptTrial) -> None:
        self.trial = trial

    def start(self, training: Training) -> None:
        self.trial.note_step(training.step, None)

    def log_entry(self, training: Training) -> None:
        run, step = self.trial.run, training.step
        self.trial.note_step(step, training.results.get("train/loss", float("nan")))
        if run.kill == (training.rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= run.steps:
            training.request_stop("lockstep verify has enough steps")


def _reversed(collate: Any, samples: Sequence[Any]) -> Any:
    return collate(list(samples)[::-1])


def sketch(tensor: Tensor) -> list[float]:
    """64 numbers that represent a tensor: tensors at a distance d have sketches at about the distance d.

    A tensor with at most 64 numbers is its own sketch. Otherwise each number is a sum over a part of the tensor, with
    signs that look random.
    """
    values = numbers(tensor).reshape(-1)
    if len(values) <= _NUMBERS:
        return [float(value) for value in values.tolist()]
    places = torch.arange(len(values), device=values.device)
    signs = 1 - 2 * ((((places + 1) * 2654435761) >> 15) & 1)
    padded = torch.nn.functional.pad(values * signs, (0, -len(values) % _NUMBERS))
    sums: list[float] = padded.reshape(-1, _NUMBERS).sum(0).tolist()
    return sums
