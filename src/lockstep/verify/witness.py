"""Sees a training on one rank, between its steps: samples, losses, digests of its state, gradients, operations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import trainer
from lockstep.build import PreparedRun
from lockstep.data.loader import MicroBatch
from lockstep.distributed import sharded_tensor
from lockstep.distributed.gradients import grad_norm
from lockstep.tasks.task import Task
from lockstep.verify.digest import digest, digest_of_batch
from lockstep.verify.generators import disturb
from lockstep.verify.operations import Operations, Talk
from lockstep.verify.oracle import Update, plain_gradient
from lockstep.verify.shadow import Shadow

State = dict[str, tuple[int, int, int]]  # by tensor: first row here, rows here, digest


@dataclass(frozen=True)
class Watch:
    """What is looked at besides samples and losses. Each costs something, so each is asked for.

    digests: of the whole state, every so many steps (0: never). batches: digests of what the loader gives. probes: steps after
    which one batch goes through every rank. updates: steps whose gradient is compared with plain torch's. used: which
    parameters ever got a gradient that is not zero. talk: steps in which collectives and host synchronisations are counted.
    operations: the step whose every operation is digested. follow: the config whose updates plain torch makes beside the run's, on one
    process. disturb: put the generators of torch, NumPy and Python into other states before and after every step, which must
    change nothing.
    """

    digests: int = 0
    batches: bool = False
    probes: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    used: bool = False
    talk: tuple[int, ...] = ()
    operations: int | None = None
    follow: Mapping[str, Any] | None = None
    disturb: bool = False


@dataclass
class Seen:
    """What a witness saw on its rank.

    entries: of the log. samples: (step, epoch, indices that count) of each step. moved: 2-norm of what training changed in the
    parameters that are here. norms: (step, norm of the gradient as the optimizer got it). rates: (updates before, learning rate, base
    learning rate) of each update. followed, wrongly: see `Shadow.differences` and `Shadow.trainable`. unused: trainable parameters that
    never got a gradient, or only zeros. modes: steps in which the model was in evaluation mode. misled: modules that began in
    another mode than `model.train()` gives them.
    """

    entries: list[dict[str, float]] = field(default_factory=list)
    samples: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    batches: dict[int, list[int]] = field(default_factory=dict)
    digests: dict[int, State] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    probes: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    updates: dict[int, Update] = field(default_factory=dict)
    norms: list[tuple[int, float]] = field(default_factory=list)
    rates: list[tuple[int, float, float]] = field(default_factory=list)
    followed: dict[str, float] = field(default_factory=dict)
    wrongly: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    misled: list[str] = field(default_factory=list)
    talk: dict[int, Talk] = field(default_factory=dict)
    operations: list[tuple[str, int]] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    buffer_bytes: int = 0
    trainable: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sharded: bool = False
    moved: float = 0.0
    stop: int = 0
    steps_per_epoch: int = 0
    length: int = 0
    base_lr: float = 0.0

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [entry["train/loss"] for entry in self.entries if "train/loss" in entry]


class Witness(trainer.Witness):
    """A `trainer.Witness`. after: called after each step, with its number (counted from 1)."""

    def __init__(self, task: Task, watch: Watch, after: Callable[[int], None]) -> None:
        self.task, self.what, self.after = task, watch, after
        self.seen = Seen()
        self._updates = 0
        self._reference: Update | None = None
        self._never_used: dict[str, Tensor] = {}
        self._operations: Operations | None = None
        self._shadow: Shadow | None = None

    # ---- what the trainer calls

    def record(self, entry: Mapping[str, float]) -> None:
        self.seen.entries.append(dict(entry))

    def watch(self, prepared: PreparedRun) -> Iterator[list[MicroBatch]]:
        """Pass the batches on, and look at what happens between them."""
        state, model, seen = prepared.state, prepared.built.model, self.seen
        seen.stop, seen.steps_per_epoch, seen.length = (
            prepared.stop,
            prepared.plan.steps_per_epoch,
            prepared.plan.length,
        )
        seen.sharded = state.strategy.is_sharded
        seen.buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
        seen.parameters = [name for name, _ in model.named_parameters()]
        seen.trainable = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        seen.base_lr = float(state.optimizer.param_groups[-1]["base_lr"])
        self._updates = state.step - state.skipped
        if self.what.follow is not None:
            self._shadow = Shadow(prepared, self.what.follow)
            seen.followed, seen.wrongly = self._shadow.differences, self._shadow.trainable
        seen.misled = not_in_training(model)
        start = {name: sharded_tensor.local(p.detach()).clone() for name, p in model.named_parameters()}
        handles = [state.optimizer.register_step_pre_hook(partial(self._before_update, prepared))]
        try:
            for micros in prepared.batches:
                self._before(prepared, micros)
                step = state.step
                with self._listening(prepared):
                    yield micros
                if state.step > step:
                    self._after(prepared, micros)
                    self.after(state.step)
        finally:
            for handle in handles:
                handle.remove()
            seen.moved = math.sqrt(
                sum(
                    float((sharded_tensor.local(p.detach()) - start[name]).double().square().sum())
                    for name, p in model.named_parameters()
                )
            )
            seen.unused = [name for name, never in self._never_used.items() if bool(never)]

    # ---- around a step

    def _before(self, prepared: PreparedRun, micros: list[MicroBatch]) -> None:
        state, step = prepared.state, prepared.state.step
        self.seen.samples.append(
            (step, micros[0].epoch, tuple(index for micro in micros if not micro.filler for index in micro.indices))
        )
        if self.what.batches:
            self.seen.batches[step] = [digest_of_batch(micro.batch) for micro in micros]
        if not state.forward.training:
            self.seen.modes.append(step)
        if step in self.what.updates:
            self._reference = plain_gradient(prepared, self.task)
        if self.what.disturb:
            disturb(2 * step)

    def _after(self, prepared: PreparedRun, micros: list[MicroBatch]) -> None:
        state = prepared.state
        if self._shadow is not None:
            self._shadow.after_step()
        self._reference = None  # where the update was skipped, nobody has asked for it
        if self.what.digests and (state.step % self.what.digests == 0 or state.step == prepared.stop):
            self.seen.digests[state.step] = self._state(prepared)
        if state.step in self.what.probes:
            self.seen.probes[state.step] = self._probe(prepared, micros[0].batch)
        if self.what.disturb:
            disturb(2 * state.step - 1)

    def _before_update(self, prepared: PreparedRun, optimizer: Any, *_: Any) -> None:
        """What the optimizer is about to use."""
        if self._operations is not None:  # what it takes to look at it is not the step's
            return
        state, model = prepared.state, prepared.built.model
        step = state.step - 1
        if not model.training:
            self.seen.modes.append(step)
        if self._shadow is not None:
            self._shadow.before_update(step)
        self.seen.norms.append((step, float(grad_norm(state.parameters, state.strategy.shard_group))))
        group = optimizer.param_groups[-1]
        self.seen.rates.append((self._updates, float(group["lr"]), float(group["base_lr"])))
        self._updates += 1
        if self.what.used:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    grad = None if parameter.grad is None else sharded_tensor.local(parameter.grad)
                    zero = torch.tensor(grad is None or not bool(grad.any()))
                    self._never_used[name] = zero & self._never_used.get(name, torch.tensor(True))
        if self._reference is not None:
            whole = {
                name: sharded_tensor.gather_on_rank0(p.grad, state.world)
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            self.seen.updates[step] = (
                self._reference.compare(whole, state.clip_norm) if state.world.rank == 0 else self._reference
            )
            self._reference = None

    # ---- what is looked at

    def _state(self, prepared: PreparedRun) -> State:
        state, model = prepared.state, prepared.built.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = {f"model.{name}": value for name, value in model.state_dict().items()}
        held |= {
            f"optimizer.{names[id(one)]}.{slot}": value
            for one, slots in state.optimizer.state.items()
            for slot, value in slots.items()
        }
        held |= (
            {f"ema.{name}": value for name, value in state.averages.tensors.items()}
            if state.averages is not None
            else {}
        )
        held |= {
            f"buffer.{name}": buffer for name, buffer in model.named_buffers() if f"model.{name}" not in held
        }  # no checkpoint holds them
        tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        state.strategy.sync_buffers()  # as the next step, an evaluation and a checkpoint begin
        found: State = {}
        for name, tensor in tensors.items():
            rows = sharded_tensor.local_shard(tensor)
            found[name] = (rows.start, len(rows.local) if rows.local.ndim else 1, digest(rows.local))
            self.seen.shapes[name] = rows.shape
        return found

    def _probe(self, prepared: PreparedRun, batch: Any) -> list[dict[str, str]]:
        """Losses of rank 0's batch on every rank, as exact numbers; the same list on all ranks."""
        state, world = prepared.state, prepared.state.world
        batch = world.broadcast(batch)
        state.strategy.sync_buffers()
        with state.strategy.inference() as forward:
            forward.eval()
            with torch.no_grad(), state.precision.autocast():
                losses = forward(batch)
            forward.train()
        mine = {head: float(loss).hex() for head, loss in losses.items()}
        found: list[dict[str, str]] = world.broadcast(world.gather(mine))
        return found

    @contextlib.contextmanager
    def _listening(self, prepared: PreparedRun) -> Iterator[None]:
        """Look at the operations of the step that follows, where that is wanted."""
        step = prepared.state.step
        if step not in self.what.talk and step != self.what.operations:
            yield
            return
        self._operations = operations = Operations(prepared.state.optimizer, digests=step == self.what.operations)
        try:
            with operations:
                yield
        finally:
            self._operations = None
        if operations.digests:
            self.seen.operations = operations.seen
        else:
            self.seen.talk[step] = operations.talk


def not_in_training(model: nn.Module) -> list[str]:
    """Modules that are in another mode than `model.train()` gives them, which models override to freeze BatchNorm. Leaves all as they are."""
    modes = {name: module.training for name, module in model.named_modules()}
    model.train()
    found = []
    for name, module in model.named_modules():
        if module.training != modes[name]:
            found.append(name or type(module).__name__)
        module.training = modes[name]
    return found
