"""Reasons why a training depends on how it is run: dropout, batch statistics, a mean instead of a sum."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lockstep.core import batch_norm
from lockstep.core.parallel.world import join_world
from lockstep.core.run_model import build_model, make_optimizer, seed_everything
from lockstep.core.task import Task, loss_of_batch, needs_global_batch
from lockstep.trainer.trainer import Trainer
from lockstep.updates.players import Player
from lockstep_lab.verify import generators
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.causality import sees_future
from lockstep_lab.verify.comparable_task import (
    ComparableTask,
    DropoutDisabled,
    TaskChanges,
    batch_norm_modules,
    buffers_put_back,
    disable_dropout,
    sum_of_heads,
)
from lockstep_lab.verify.coupling import COUPLED, Coupling, find_coupling, halved
from lockstep_lab.verify.derivative import wrong_derivative
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.repetition import depends_on_rank, differs, model_difference, unchanged_buffers
from lockstep_lab.verify.step_operations import pretended_ranks
from lockstep_lab.verify.zero_outputs import other_units

_SAMPLING = ("multinomial", "bernoulli", "bernoulli_", "poisson", "binomial")  # others draw noise
_OPPONENTS = "its alternating optimizers lower their own losses, and one may rise while another falls"
_NOT_ADDED_UP = 1e-3  # relative difference above which a weight does not add up


@dataclass
class TaskProbe(Coupling):
    """The facts about the task that a forward and a backward pass over some samples show."""

    random: list[str] = field(default_factory=list)
    """Operations that draw random numbers in a training loss."""
    random_without_dropout: list[str] = field(default_factory=list)
    """The same with dropout switched off."""
    random_in_evaluation: list[str] = field(default_factory=list)
    """The same for the loss in evaluation mode."""
    random_in_prediction: list[str] = field(default_factory=list)
    """The same for `Task.predict`."""
    random_in_collate: list[str] = field(default_factory=list)
    """Generators that `Task.collate` draws from."""
    seeded_for_sample: list[str] = field(default_factory=list)
    """Generators that reading or preparing a sample seeds itself."""
    seeded_alike: list[str] = field(default_factory=list)
    """Those of them that get the same seed for every sample."""
    dropouts: int = 0
    """Dropout probabilities that were set to zero."""
    batch_norms: int = 0
    """BatchNorm modules that normalise by batch statistics in training. Frozen modules do not."""
    without_statistics: int = 0
    """BatchNorm modules that keep no running statistics."""
    float64: bool = True
    """True if the task runs in float64."""
    float64_error: str = ""
    """Why the task does not run in float64."""
    weight_difference: str = ""
    """The difference of the weight of a batch from the sum over its samples."""
    model_difference: str = ""
    """The difference of two models that were made with the same seed. See `repetition`."""
    dropped_in_prediction: str = ""
    """The place of a dropout that is active in `Task.predict`, except on purpose."""
    sees_future: str = ""
    """See `causality.sees_future`."""
    changes_batch: str = ""
    """The method of the task that writes into its batch in an evaluation."""
    loss_difference: str = ""
    """The losses of the same batch with the same seed, if they differ: two values."""
    prediction_difference: str = ""
    """The outputs for the same batch in evaluation mode with the same seed, if they differ: two values."""
    rank_difference: str = ""
    """The difference of the loss of the same batch on rank 0 and on rank 1."""
    remarks: list[str] = field(default_factory=list)
    """Facts that may be faults or intended, for people."""

    moving_buffers: list[str] = field(default_factory=list)
    """Buffers that a training pass changes, so that a second pass over the same batch has a different loss."""
    moving: float = 0.0
    """Relative difference of the losses of two training passes over the same batch, with those buffers restored."""
    players: tuple[Player, ...] = ()
    """The alternating optimizers of the task (players), which update in turn."""
    gathers: bool = False
    """True if the task has `embed`, whose outputs ranks gather."""
    collectives: list[str] = field(default_factory=list)
    """Collectives that the loss makes itself if there are several ranks."""

    derivative: Literal["compared", "wrong", ""] = ""
    """True if the gradient was compared with a numerical derivative, and differs."""

    def need_not_fall(self) -> str:
        """Why the loss of a right training need not fall; empty if it must."""
        actions = [name for name in self.random_without_dropout if name in _SAMPLING]
        if actions:
            return f"the loss draws actions from the model's output ({', '.join(actions)}), as a policy gradient does"
        return _OPPONENTS if self.players else ""

    def own_gradients(self) -> str:
        """Words for the end of a reason, if there are custom backward passes."""
        if not self.own_backwards:
            return ""
        names = ", ".join(self.own_backwards[:3])
        if self.derivative == "wrong":
            return f"; but it is not the derivative of the loss, see the note. Custom backward passes: {names}"
        if self.derivative == "compared":
            return f"; a numerical derivative agrees with the backward pass of {names}"
        why = "the task does not run in float64" if not self.float64 else "the loss does not repeat exactly"
        return f"; the backward pass of {names} was not compared with a numerical derivative, because {why}"

    def precision(self) -> str:
        """Words for the end of a reason, if the model or the loss computes in a coarser number format on the way."""
        return f"; the task rounds to {self.coarse}, which the bound includes" if self.coarse else ""

    def notes(self) -> list[str]:
        """What a comparison of two trainings switches off, for people."""
        notes = []
        if self.random and not self.random_without_dropout:
            notes.append("dropout is off for this comparison: its draws depend on the number of ranks")
        if self.batch_norms:
            notes.append(
                f"{self.batch_norms} BatchNorm modules keep fixed statistics for this comparison: "
                "batch statistics depend on how the batch is split"
            )
        if self.moving_buffers:
            notes.append(
                f"{len(self.moving_buffers)} buffers that each training pass changes are restored after each pass, "
                "for this comparison, because the number of passes depends on how the batch is split: "
                f"{', '.join(self.moving_buffers[:3])}"
            )
        if not self.float64:
            notes.append(f"compared in the model's own number format, because float64 fails: {self.float64_error}")
        return notes

    def cause_of_indeterminism(self) -> str:
        """Why the same training has a different result the second time; empty if unknown."""
        if self.model_difference:
            return self.model_difference
        if self.loss_difference:
            return (
                f"the loss of the same batch is {self.loss_difference} with the same weights and seed: "
                "it depends on something that the seed does not determine, such as the clock"
            )
        return ""

    def obstacle(self) -> str | None:
        """Why trainings on different numbers of ranks cannot be compared; None if they can."""
        return self.unrepeatable() or self.dependence_on_split()

    def unrepeatable(self) -> str | None:
        """Why equal passes over equal batches differ, or ranks depend on each other; None if they do not."""
        if self.moving > COUPLED * self.epsilon:
            return (
                f"a second training pass on the same batch has a different loss ({self.moving:.2g} off): the model or "
                "the task counts its passes, and their number depends on how the batch is split"
            )
        if self.cause_of_indeterminism():
            return f"{self.cause_of_indeterminism()}; see determinism"
        if self.collectives:
            names = ", ".join(self.collectives[:3])
            return f"Task.loss makes collectives ({names}): it depends on which samples other ranks have"
        return None

    def dependence_on_split(self) -> str | None:
        """Why a right training depends on the split of the batch into micro-batches; None if it does not.

        With the same virtual ranks, the split is the same on any number of ranks.
        """
        if self.random_without_dropout:
            operations = ", ".join(self.random_without_dropout[:3])
            return f"the model draws random numbers in addition to dropout ({operations}), different ones on each rank"
        if self.random_in_collate:
            generators = ", ".join(self.random_in_collate)
            return f"Task.collate draws random numbers ({generators}), different ones for each micro-batch"
        if self.without_statistics:
            return (
                f"{self.without_statistics} BatchNorm modules keep no running statistics, "
                "so their result depends on how the batch is split"
            )
        if self.compares_samples:
            return (
                f"the loss of a batch is not the sum over its parts (off by {self.coupling:.2g} on a batch of two "
                "halves): Task.loss compares the samples of a micro-batch with each other, as with in-batch negatives, "
                f"{self.compares_samples}"
            )
        if self.by_statistics:
            return (
                f"{self.by_statistics} depends on which samples share a micro-batch (off by {self.coupling:.2g} on a "
                "batch of two halves). Accept that it counts for each micro-batch, synchronise it over ranks, freeze "
                "it, or give the loss the global batch with Task.embed: lockstep --explain global_loss"
            )
        return None

    def diagnosis(self) -> str:
        """A likely cause if such trainings differ; empty if none is known."""
        if self.rank_difference:
            return f"Task.loss depends on the rank: for the same batch, on ranks 0 and 1, {self.rank_difference}"
        if self.weight_difference:
            return f"Task.weight must add up over batches, and does not: {self.weight_difference}"
        off = f"off by {self.coupling:.2g} on a batch of two halves"
        if self.mean_heads:
            heads = f" for {', '.join(map(repr, self.mean_heads))}" if self.mean_heads != ["loss"] else ""
            return f"Task.loss must return a SUM over its units (reduction='sum'), but returns a mean{heads}: {off}"
        if self.in_collate:
            return (
                "Task.collate gives a sample other numbers in another micro-batch, such as a normalisation by the "
                "batch. Use statistics of the whole training data, in Task.prepare"
            )
        if self.divided_by:
            return (
                f"the loss is a mean: it was divided by the sum that {self.divided_by} makes in each micro-batch, and "
                "micro-batches have different ones. Return the SUM, and this count by Task.weight"
            )
        if self.is_no_sum:
            once = "a term is a mean or is added once per batch, or " if self.adds_once else ""
            return (
                f"the loss of a micro-batch is not the sum over its samples ({off}): {once}samples influence each other"
                f"{self.meets_at and f', first in {self.meets_at}'}, or Task.weight counts wrongly. A ratio over the "
                "batch (Dice, IoU, F-beta) gets the global batch through Task.embed; for a mean with class weights, "
                "Task.weight returns the sum of the weights: lockstep --explain global_loss"
            )
        return ""


def probe_task(config: Mapping[str, Any], train_samples: int) -> TaskProbe:
    """Examine the task of `config` on one process, with up to eight of `train_samples` samples.

    Raises:
        LockstepError: the config does not fit the model, or the data cannot be found.
    """
    trainer = Trainer(config, quiet=True)
    task = task_of(trainer)
    task.eval_data()
    skip = trainer.config.data.on_error != "raise"
    read = partial(_samples, train_samples=train_samples, seed=trainer.config.seed, skip=skip)
    with join_world(trainer.config.device) as world:
        built = build_model(trainer.config, task, world, steps_per_epoch=1)
        make_optimizer(trainer.config, task, built.strategy.unwrapped.model, built.blocks)
        seed_everything(trainer.config)
        probe = TaskProbe(players=tuple(task.players), gathers=needs_global_batch(task))

        def make() -> nn.Module:
            seed_everything(trainer.config)
            return task.model().to(world.device).train()

        model = make()
        probe.batch_norms = len(batch_norm.by_batch(model))
        probe.without_statistics = sum(norm.running_mean is None for norm in batch_norm_modules(model))
        samples = read(task)
        _find_seeding(probe, task, train_samples)
        before = generators.states()
        (whole, _), *_ = halved(task, samples, world.device)
        probe.random_in_collate = generators.changed(before)
        with contextlib.suppress(Exception):  # training reports errors in the model or the loss itself
            probe.model_difference = model_difference(make, model, partial(_loss, task, whole))
        _find_draws(probe, task, model, whole)
        probe.collectives = _collectives(task, whole, world.device)
        for float64 in (True, False):
            exact = ComparableTask(task, TaskChanges(exact=True, float64=float64, train_samples=train_samples))
            try:
                seed_everything(trainer.config)
                model = exact.model().to(world.device).train()
                samples = read(exact)
                batches = halved(exact, samples, world.device)
                probe.random_without_dropout = generators.random_operations(loss_of_batch(exact), model, batches[0][0])
                _refuse_other_formats(model, float64)
                _find_moving_buffers(probe, exact, model, batches[0][0])
                exact.changes = dataclasses.replace(exact.changes, fixed_buffers=tuple(probe.moving_buffers))
                found = find_coupling(exact, model, batches, partial(read, exact))
                if probe.gathers:  # samples are compared on purpose, across the whole global batch
                    found = Coupling(found.epsilon, found.coarse, found.own_backwards)
                vars(probe).update(vars(found))
                probe.has_comparison = found.has_comparison and bool(found.compares_samples)
                probe.compares_samples = "" if found.mean_heads else found.compares_samples
                probe.loss_difference = differs(loss_of_batch(exact), model, batches[-1][0])
                _compare_weights(probe, exact, samples)
                _find_remarks(probe, exact, model, samples, batches[-1][0])
                break
            except Exception as error:
                if not float64:
                    raise
                first_line = str(error).splitlines()[0] if str(error) else ""
                probe.float64, probe.float64_error = False, f"{type(error).__name__}: {first_line}"
    return probe


def _loss(task: Task, batch: Any, model: nn.Module) -> Any:
    return data.losses(task, model, batch)


def _samples(task: Task, *, train_samples: int, seed: int, skip: bool, most: int = 8) -> list[Any]:
    """Up to `most` prepared training samples."""
    samples_of: Any = task.train_data()
    first = range(min(most, train_samples, len(samples_of)))
    return data.read(task, samples_of, first, epoch=0, training=True, seed=seed, skip=skip)


def _find_draws(probe: TaskProbe, task: Task, model: nn.Module, batch: Any) -> None:
    """Find what draws random numbers, set all dropout probabilities to zero, and find out who sees later tokens."""
    loss, training = loss_of_batch(task), model.training
    with contextlib.suppress(Exception), torch.no_grad(), unchanged_buffers(model):
        calls = {"Task.loss": loss, "Task.predict": task.predict}
        probe.changes_batch = next((name for name, call in calls.items() if _changes(call, model.eval(), batch)), "")
    model.train(training)
    probe.random = generators.random_operations(loss, model, batch)
    probe.random_in_evaluation = generators.random_operations(loss, model.eval(), batch)
    with contextlib.suppress(Exception):  # other checks report whether the task can predict
        probe.random_in_prediction = generators.random_operations(task.predict, model, batch)
        probe.prediction_difference = differs(task.predict, model, batch)
    dropped = generators.drawing_line(task.predict, model, batch)
    probe.dropouts = disable_dropout(model)
    with contextlib.suppress(Exception), DropoutDisabled():
        if dropped and not generators.random_operations(task.predict, model.eval(), batch):
            probe.dropped_in_prediction = dropped
    with contextlib.suppress(Exception), DropoutDisabled():
        probe.sees_future = sees_future(loss, model.eval(), batch)


def _changes(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> bool:
    """True if a call writes into the tensors of its batch, which is left as it was."""
    own = data.mapped(batch, torch.clone)
    before = [tensor.clone() for tensor in data.tensors(own)]
    call(model, own)
    pairs = zip(before, data.tensors(own), strict=True)
    return any(not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs)


def _find_seeding(probe: TaskProbe, task: Task, train_samples: int) -> None:
    """Find out whether reading a sample seeds a global generator: its state then forgets the previous one."""
    samples_of: Any = task.train_data()
    after: list[list[dict[str, str]]] = []
    for index in sorted({0, min(train_samples, len(samples_of)) - 1}):
        states = []
        for number in (1, 2):
            generators.disturb(number)
            try:
                task.prepare(samples_of[index], 0, True)
            except Exception:  # other checks report unreadable samples
                return
            states.append(generators.states())
        after.append(states)
    first, *others = after
    probe.seeded_for_sample = [name for name, state in first[0].items() if state == first[1][name]]
    probe.seeded_alike = [
        name
        for name in probe.seeded_for_sample
        if others and all(states[0][name] == first[0][name] for states in others)
    ]


def _refuse_other_formats(model: nn.Module, float64: bool) -> None:
    """Raises TypeError if a forward pass changed the format of a parameter from float64, as some routers do."""
    for name, parameter in model.named_parameters() if float64 else ():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            raise TypeError(f"the forward pass converts the parameter {name} to {parameter.dtype}")


def _compare_weights(probe: TaskProbe, task: Task, samples: list[Any]) -> None:
    """Find out whether the weight of a batch is the sum over its samples."""
    if probe.random_in_collate or probe.has_comparison:
        return
    with contextlib.suppress(Exception):  # a task may refuse single samples
        of_samples = data.count_units(task, [(task.collate([sample]), 1) for sample in samples])
        for head, count in data.count_units(task, [(task.collate(samples), len(samples))]).items():
            total = of_samples[head]
            if abs(count - total) > _NOT_ADDED_UP * max(abs(count), abs(total)):
                probe.weight_difference = (
                    f"it is {count:g} for a batch of {len(samples)} samples, but {total:g} for these samples one by one"
                )


def _find_remarks(probe: TaskProbe, task: ComparableTask, model: nn.Module, samples: list[Any], batch: Any) -> None:
    """Look for possible faults, on a model that drops nothing. A task that fails under this probe has no remarks."""
    if probe.loss_difference or probe.random_without_dropout:
        return
    with contextlib.suppress(Exception):  # simulated collectives return arbitrary numbers
        probe.rank_difference = "" if probe.collectives else depends_on_rank(loss_of_batch(task), model, batch)
    if not task.changes.float64:
        return
    with contextlib.suppress(Exception):
        difference = wrong_derivative(loss_of_batch(task), model, batch, epsilon=probe.epsilon)
        probe.derivative = "wrong" if difference else "compared"
        if difference:
            probe.remarks.append(
                f"the gradient is not the derivative of the loss: {difference}. This is correct if detach(), a "
                "straight-through estimator or a reversed gradient is intended. If not, check the backward passes of "
                "torch.autograd.Function"
            )
    with contextlib.suppress(Exception):
        units = other_units(task, model, samples, next(model.parameters()).device)
        probe.remarks.extend([units] if units else [])


def _find_moving_buffers(probe: TaskProbe, task: Task, model: nn.Module, batch: Any) -> None:
    """Find out whether a second training pass over the same batch has a different loss, and which buffers changed."""

    def loss() -> float:
        return sum_of_heads(data.losses(task, model, batch)).item()

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        if probe.random_without_dropout or loss() == loss():
            return
        moved = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
        losses = []
        for _ in range(2):
            with buffers_put_back(model, moved):
                losses.append(loss())
    probe.moving_buffers = moved
    probe.moving = abs(losses[0] - losses[1]) / max(*map(abs, losses), 1e-30)


def _collectives(task: Task, batch: Any, device: torch.device) -> list[str]:
    """Names of the collectives that the loss makes in a simulated world of two ranks. None of them communicates."""
    with pretended_ranks(2) as operations, contextlib.suppress(Exception):
        data.losses(task, task.model().to(device).train(), batch)
    return operations.names
