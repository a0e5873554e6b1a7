"""Records a training on one rank, between its steps: samples, losses, digests of its state, gradients, operations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import devices, optimizer_class
from lockstep.core.build import Run
from lockstep.core.built_in import Inside
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.randomness import restored_generators
from lockstep.core.defaults import is_default
from lockstep.core.parallel import sharded_tensor
from lockstep.core.parallel.gradients import grad_norm
from lockstep.core.parameter_names import names_of_parameters
from lockstep.core.part import Training
from lockstep.core.task import Task
from lockstep.parts import replicas
from lockstep.parts.digest import Digest, digest_of_batch
from lockstep.parts.operations import Results
from lockstep.parts.replicas import StateDigests
from lockstep.trainer.joining import Recorder
from lockstep_lab.verify import dependence
from lockstep_lab.verify.comparable_task import ComparableTask
from lockstep_lab.verify.generators import disturb
from lockstep_lab.verify.reference.data import EVERY_HEAD, numbers
from lockstep_lab.verify.reference.gradient import GradientComparison, reference_gradient
from lockstep_lab.verify.reference.optimizer import ReferenceOptimizer
from lockstep_lab.verify.step_operations import StepCommunication, StepOperations


@dataclass(frozen=True)
class RecorderOptions:
    """What to record in addition to samples and losses. Everything here costs time, so it is off by default."""

    digest_every: int = 0
    """Digests of the whole state, every this many steps. 0: never."""
    digest_batches: bool = False
    """Digests of all micro-batches that the loader yields."""
    probe_steps: tuple[int, ...] = ()
    """After these steps, the same batch passes through the model on every rank."""
    gradient_steps: tuple[int, ...] = ()
    """In these steps (counted from 0), the gradient is compared with plain torch's. If a step makes no update, in the
    next one that does."""
    unused_parameters: bool = False
    """Find parameters that only got zero gradients."""
    communication_steps: tuple[int, ...] = ()
    """In these steps (counted from 0), collectives and waits of the host are recorded."""
    operations_step: int | None = None
    """In this step (counted from 0), the result of every operation is digested."""
    repeat_updates: bool = False
    """Plain torch also makes every update, on one process."""
    disturb_generators: bool = False
    """Put the global random generators into different states around every step, which must change nothing."""
    dependence: bool = False
    """Find what may make the training depend on its number of ranks; see `dependence`."""


@dataclass
class Recording:
    """The record of a training on one rank."""

    entries: list[dict[str, float]] = field(default_factory=list)
    """The entries of the log."""
    samples: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(step counted from 0, epoch, indices that count) of each step. Of a tensor group, the first rank has them."""
    batches: dict[int, list[Digest]] = field(default_factory=dict)
    """Digests of the micro-batches, by step counted from 0."""
    units: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step counted from 0: the units on this rank by head, or under `EVERY_HEAD` the samples."""
    generators: dict[int, list[str]] = field(default_factory=dict)
    """By step counted from 0: the states of the random generators before each training loss. See `TaskChanges`."""
    digests: dict[int, StateDigests] = field(default_factory=dict)
    """Digests of the state, by number of steps done. Those of 0 steps are of the initial state."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors in `digests`, unsharded."""
    probes: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    """By number of steps done: for each rank, the loss of the same batch by head, as exact hexadecimal numbers."""
    gradients: dict[int, GradientComparison] = field(default_factory=dict)
    """By step counted from 0."""
    grad_norms: list[tuple[int, float]] = field(default_factory=list)
    """(step counted from 0, norm of the gradient as the optimizer got it)."""
    own_rates: bool = False
    """True if the task or a user's function chooses the learning rates, so there is no formula."""
    learning_rates: list[tuple[int, float, float]] = field(default_factory=list)
    """(updates before, learning rate, base learning rate) of each update."""
    reference_differences: dict[str, float] = field(default_factory=dict)
    """See `ReferenceOptimizer.differences`."""
    wrongly_trainable: list[str] = field(default_factory=list)
    """See `ReferenceOptimizer.wrongly_trainable`."""
    unused: list[str] = field(default_factory=list)
    """Trainable parameters that never got a gradient, or only zeros."""
    steps_in_eval_mode: list[int] = field(default_factory=list)
    """Steps, counted from 0, in which the model was in evaluation mode."""
    wrong_modes: list[str] = field(default_factory=list)
    """Modules that began in a different mode than `model.train()` sets."""
    communication: dict[int, StepCommunication] = field(default_factory=dict)
    """By step counted from 0."""
    reads_of_rank: list[str] = field(default_factory=list)
    """Places in the user's code that read the rank, or the number of ranks."""
    changed_outside: list[str] = field(default_factory=list)
    """Names of state outside of buffers that steps change."""
    operations: list[tuple[str, str, tuple[Digest, ...]]] = field(default_factory=list)
    """(name, digest of the result) of each operation of one step."""
    parameters: list[str] = field(default_factory=list)
    """Names of all parameters, except those that are frozen and not saved."""
    trainable: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the parameters that train, unsharded. A complex number counts as two."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """All names of each parameter, by its first: a tied parameter has several."""
    buffer_bytes: int = 0
    """Size of all buffers."""
    sharded: bool = False
    """True if ranks hold shards of the parameters."""
    moves_in_passes: list[str] = field(default_factory=list)
    """Parameters that forward passes change."""
    moved: float = 0.0
    """2-norm of what training changed in the parameters on this rank."""
    stop: int = 0
    """Number of steps of the whole training."""
    steps_per_epoch: int = 0
    length: int = 0
    """Number of training samples."""
    base_lr: float = 0.0
    """Base learning rate of the last parameter group."""

    @property
    def losses(self) -> list[float]:
        """The logged losses, in the order of the steps."""
        return [entry["train/loss"] for entry in self.entries if "train/loss" in entry]

    @property
    def losses_by_step(self) -> dict[int, float]:
        """The same by step, counted from 0. A step without a valid unit has no loss."""
        return {int(entry["step"]) - 1: entry["train/loss"] for entry in self.entries if "train/loss" in entry}


class TrainingRecorder(Recorder):
    """Records a training on this rank.

    Args:
        task: of the training.
        config: of the training, as `RunConfig` writes it.
        options: what to record.
        on_step: called after each step and all that follows it, such as a save, with its number (counted from 1).
    """

    def __init__(
        self,
        task: ComparableTask,
        config: Mapping[str, Any],
        options: RecorderOptions,
        on_step: Callable[[int], None],
    ) -> None:
        self.task, self.config, self.options, self.on_step = task, config, options, on_step
        self.recording = Recording()
        self._updates = 0
        self._gradient_steps = set(options.gradient_steps)
        self._gradient: GradientComparison | None = None
        self._never_used: dict[str, Tensor] = {}
        self._is_recording_operations = False
        self._reference_optimizer: ReferenceOptimizer | None = None
        self._start: dict[str, Tensor] = {}  # the parameters before the first step
        self._outside: dict[str, str] = {}  # before the first step
        self._recording_operations = contextlib.ExitStack()

    # ---- called by the trainer

    def record(self, entry: Mapping[str, float]) -> None:
        self.recording.entries.append(dict(entry))

    def join(self, run: Run) -> None:
        self.run = run

    def start(self, training: Training) -> None:
        run, state, model, recording = self.run, self.run.state, self.run.model, self.recording
        self._record_facts(run)
        self._updates = state.step - state.skipped
        if self.options.repeat_updates:
            self._reference_optimizer = ReferenceOptimizer(
                model,
                self.config,
                steps_per_epoch=run.plan.steps_per_epoch,
                blocks=run.blocks,
                state=state.optimizer.state,
                find=optimizer_class.find,
                make=self.task.optimizer,
                factor=state.schedule.own,
            )
            recording.reference_differences = self._reference_optimizer.differences
            recording.wrongly_trainable = self._reference_optimizer.wrongly_trainable
        recording.wrong_modes = modules_in_wrong_mode(model)
        self._start = {name: sharded_tensor.local(p.detach()).clone() for name, p in model.named_parameters()}
        if self.options.digest_every:
            recording.digests[state.step] = self._digest_state(run)
        if self.options.dependence:
            self._outside = self._state_outside(run)

    def before_step(self, training: Training) -> None:
        """Record what the step gets, when all is done that follows the step before."""
        assert isinstance(training, Inside)
        self._tell_done(training.step)
        self._before_step(self.run, training.micro_batches)
        self._recording_operations.enter_context(self._record_operations(self.run))

    def before_update(self, training: Training) -> None:
        self._before_update(self.run, self.run.state.optimizer)

    def after_step(self, training: Training) -> None:
        assert isinstance(training, Inside)
        self._recording_operations.close()
        self._after_step(self.run, training.micro_batches)

    def end(self, training: Training) -> None:
        self._tell_done(training.step)

    def close(self) -> None:
        """Record what is known at the end, also where the training was stopped."""
        self._recording_operations.close()
        recording, start, self._start = self.recording, self._start, {}
        now = {name: sharded_tensor.local(p.detach()) for name, p in self.run.model.named_parameters()}
        if start and all(now[name].shape == begun.shape for name, begun in start.items()):  # else a pass has failed
            moved = [numbers(now[name]) - numbers(begun) for name, begun in start.items()]
            recording.moves_in_passes = self.run.moves_in_passes
            recording.moved = math.sqrt(sum(float(change.square().sum()) for change in moved))
            recording.unused = [name for name, never in self._never_used.items() if bool(never)]

    def _tell_done(self, step: int) -> None:
        """Tell whoever wants to know that a step of this start is done, with all that follows it."""
        if step > self.run.first_step:
            self.on_step(step)

    # ---- around a step

    def _record_facts(self, run: Run) -> None:
        """Record what stays the same during the training."""
        state, model, recording = run.state, run.model, self.recording
        recording.stop, recording.length = run.stop, run.plan.length
        recording.steps_per_epoch = run.plan.steps_per_epoch
        recording.sharded = state.strategy.is_sharded
        recording.buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
        held = model.state_dict()
        recording.parameters = [name for name, p in model.named_parameters() if p.requires_grad or name in held]
        recording.trainable = {
            name: (*p.shape, 2) if p.is_complex() else tuple(p.shape)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        recording.names = names_of_parameters(model)
        recording.own_rates = state.schedule.own is not None or not is_default(self.task.optimizer)
        recording.base_lr = float(state.optimizer.param_groups[-1]["base_lr"])

    def _before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> None:
        state, step = run.state, run.state.step
        indices = tuple(index for micro in micro_batches if not micro.filler for index in micro.indices)
        if state.world.is_group_leader:  # all ranks of a tensor group have the same samples, which count once
            self.recording.samples.append((step, micro_batches[0].epoch, indices))
        units = self.recording.units[step] = {}
        for micro in micro_batches if state.world.is_group_leader else ():
            for head, count in ({EVERY_HEAD: micro.samples} if micro.weights is None else micro.weights).items():
                units[head] = units.get(head, 0.0) + count
        if self.options.digest_batches:
            self.recording.batches[step] = [digest_of_batch(micro.batch) for micro in micro_batches]
        if not state.forward.training:
            self.recording.steps_in_eval_mode.append(step)
        if step in self._gradient_steps:
            self._gradient = self._reference_gradient(run)
        if self.options.disturb_generators:
            disturb(2 * step)

    def _reference_gradient(self, run: Run) -> GradientComparison:
        """Plain torch's gradient of the step that is about to begin, on rank 0. All ranks must call this method."""
        model = _copy_of_model(run, self.task)
        if model is None:
            return GradientComparison()
        return reference_gradient(self.task, model, self.config, run.state.step, run.state.world.device)

    def _after_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> None:
        state, options = run.state, self.options
        if self.task.changes.note_generators:
            self.recording.generators[state.step - 1] = self.task.generator_states[:]
            self.task.generator_states.clear()
        if self._reference_optimizer is not None:
            averages = state.averages.tensors if state.averages else None
            self._reference_optimizer.after_step(averages, run.moves_in_passes)
        if self._gradient is not None:  # the update was skipped
            self._gradient = None
            self._gradient_steps.add(state.step)
        if options.dependence:
            outside = self._state_outside(run)
            self.recording.changed_outside = [name for name in outside if outside[name] != self._outside.get(name)]
        if options.digest_every and (state.step % options.digest_every == 0 or state.step == run.stop):
            self.recording.digests[state.step] = self._digest_state(run)
        if state.step in options.probe_steps:
            self.recording.probes[state.step] = replicas.losses_of_one_batch(state, micro_batches[0].batch)
        if options.disturb_generators:
            disturb(2 * state.step - 1)

    def _before_update(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        """Record what the optimizer is about to use."""
        if self._is_recording_operations:  # or operations made here would be recorded as the step's
            return
        state, model, recording = run.state, run.model, self.recording
        step = state.step - 1
        is_first = not recording.grad_norms or recording.grad_norms[-1][0] != step
        if not model.training:
            recording.steps_in_eval_mode.append(step)
        if self._reference_optimizer is not None:
            with restored_generators(state.world.device):  # an update may draw, and the training's must draw the same
                self._reference_optimizer.before_update(step, is_first=is_first, moved=run.moves_in_passes)
        if not is_first:  # the log has the norm of the last optimizer
            recording.grad_norms.pop()
        recording.grad_norms.append((step, float(grad_norm(state.parameters))))
        group = optimizer.param_groups[-1]
        if is_first:
            recording.learning_rates.append((self._updates, float(group["lr"]), float(group["base_lr"])))
        self._updates += is_first
        if self.options.unused_parameters:
            self._note_unused(model)
        if self._gradient is not None:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            whole = {
                name: sharded_tensor.gather_on_rank0(gradient, state.world) for name, gradient in gradients.items()
            }
            compared = self._gradient.compare(whole, state.clip_norm) if state.world.rank == 0 else self._gradient
            recording.gradients[step] = compared
            self._gradient = None

    def _note_unused(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = None if parameter.grad is None else sharded_tensor.local(parameter.grad)
                zero = torch.tensor(grad is None or not bool(grad.any()))
                self._never_used[name] = zero & self._never_used.get(name, torch.tensor(True))

    # ---- what is recorded

    def _state_outside(self, run: Run) -> dict[str, str]:
        return dependence.state_outside(self.task.task, self.task.data, run.model)

    def _digest_state(self, run: Run) -> StateDigests:
        """Digests of weights, buffers, optimizer state and averages on this rank."""
        state = run.state
        state.strategy.begin_step()  # as before the next step, an evaluation and a checkpoint
        tensors = replicas.tensors_of_state(state)
        self.recording.shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return replicas.digests_of(tensors)

    @contextlib.contextmanager
    def _record_operations(self, run: Run) -> Iterator[None]:
        """Record the operations of the next step, if the options ask for it."""
        step, options = run.state.step, self.options
        if step not in options.communication_steps and step != options.operations_step:
            yield
            return
        results = Results() if step == options.operations_step else None
        operations = results or StepOperations(run.state.optimizer, device=devices.of(run.state.world.device))
        self._is_recording_operations = True
        try:
            with operations:
                yield
        finally:
            self._is_recording_operations = False
        if isinstance(operations, StepOperations):
            self.recording.communication[step] = operations.communication
        else:
            self.recording.operations = operations.found


def _copy_of_model(run: Run, task: Task) -> nn.Module | None:
    """A new model with the current weights, unsharded, on rank 0; None on other ranks."""
    model, world = run.model, run.state.world
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = {name: sharded_tensor.gather_on_rank0(tensor, world) for name, tensor in tensors.items()}
    if world.rank:
        return None
    copy = task.model().to(world.device)
    copy.load_state_dict(weights, strict=False)
    buffers = dict(model.named_buffers())
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, buffer in copy.named_buffers():
            buffer.copy_(buffers[name])  # includes buffers that no state dict holds
    for name, parameter in copy.named_parameters():
        parameter.requires_grad_(trainable[name])
    return copy.train()


def modules_in_wrong_mode(model: nn.Module) -> list[str]:
    """Names of modules that are in a different mode than `model.train()` sets. All modules keep their modes.

    Models override `train` to freeze BatchNorm.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    model.train()
    wrong = []
    for name, module in model.named_modules():
        if module.training != modes[name]:
            wrong.append(name or type(module).__name__)
        module.training = modes[name]
    return wrong
