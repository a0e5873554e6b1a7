"""What in a model or a loss makes its training depend on how it is run: dropout, batch statistics, a mean instead of a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.build import build_model, make_optimizer, seed_everything
from lockstep.data.loader import MicroBatches, OnError, map_tensors
from lockstep.distributed.strategy import by_head
from lockstep.distributed.world import join_world
from lockstep.engine.step import SAMPLES
from lockstep.tasks.task import Task
from lockstep.trainer import Trainer
from lockstep.verify import generators
from lockstep.verify.adjusted import Adjusted, Adjustment, batch_norms, readable, silence, total, units_of
from lockstep.verify.operations import Drawing


@dataclass
class Nature:
    """What was found in a forward and backward pass of some samples.

    random: operations that draw random numbers, as the task is. still_random: also without dropout. evaluating, predicting: in
    the loss and in a prediction in evaluation mode. mixed: generators that `collate` draws from. dropouts: probabilities set to
    zero. norms: BatchNorm modules; unfixable: those without running statistics. double: whether float64 works; else not_double
    says why not. epsilon: relative rounding of the number format that the loss comes in. coupling: difference between the loss
    of a batch and the sum over its halves, relative to the loss, of the head where it is largest. means: heads of which the
    loss of a batch is the mean over its halves instead.
    """

    random: list[str] = field(default_factory=list)
    still_random: list[str] = field(default_factory=list)
    evaluating: list[str] = field(default_factory=list)
    predicting: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    dropouts: int = 0
    norms: int = 0
    unfixable: int = 0
    double: bool = True
    not_double: str = ""
    epsilon: float = 0.0
    coupling: float = 0.0
    means: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """What a comparison leaves out, for people."""
        found = []
        if self.random and not self.still_random:
            found.append("dropout is off for this comparison: it draws other numbers on another number of ranks")
        if self.norms:
            found.append(
                f"{self.norms} BatchNorm modules keep fixed statistics for this comparison: batch statistics depend on how the batch is cut"
            )
        if not self.double:
            found.append(f"compared in the model's own number format, since float64 fails: {self.not_double}")
        return found

    def obstacle(self) -> str | None:
        """Why runs on different numbers of ranks cannot be compared; None where they can."""
        if self.still_random:
            return f"the model draws random numbers other than dropout's ({', '.join(self.still_random[:3])}), by design others on each rank"
        if self.mixed:
            return f"Task.collate draws random numbers ({', '.join(self.mixed)}), by design others for each micro-batch"
        if self.unfixable:
            return f"{self.unfixable} BatchNorm modules keep no running statistics, so their result depends on how the batch is cut"
        return None

    def diagnosis(self) -> str:
        """A likely cause where such runs differ; empty where none is known."""
        off = f"off by {self.coupling:.2g} on a batch of two halves"
        if self.means:
            heads = f" for {', '.join(map(repr, self.means))}" if self.means != ["loss"] else ""
            return f"Task.loss returns a mean where a SUM over its units is asked for (reduction='sum'){heads}: {off}"
        if self.coupling > 1e3 * self.epsilon:
            return f"the loss of a micro-batch is not the sum over its samples ({off}): samples influence each other, or Task.weight counts wrongly"
        return ""


def look(config: Mapping[str, Any], part: int) -> Nature:
    """Examine the config's task with up to eight samples of a data set of `part`, on one process.

    Raises:
        LockstepError: the config does not fit the model, or the data cannot be found.
    """
    trainer = Trainer(config, quiet=True)
    task = trainer.task()
    task.eval_data()
    with join_world(trainer.config.device) as world:
        built = build_model(trainer.config, task, world, steps_per_epoch=1)
        make_optimizer(trainer.config, built.model, built.blocks)
        seed_everything(trainer.config)
        nature = Nature()
        model = task.model().to(world.device).train()
        nature.norms = len(batch_norms(model))
        nature.unfixable = sum(norm.running_mean is None for norm in batch_norms(model))
        (whole, _), *_ = _halves(
            task, world.device, part, trainer.config.seed, trainer.config.data.on_error, nature.mixed
        )
        nature.random = _drawn(task.loss, model, whole)
        nature.evaluating = _drawn(task.loss, model.eval(), whole)
        with contextlib.suppress(Exception):  # whether it can predict is for other checks to say
            nature.predicting = _drawn(task.predict, model, whole)
        model.train()
        nature.dropouts = silence(model)
        for double in (True, False):
            exact = Adjusted(task, Adjustment(exact=True, double=double, part=part))
            try:
                seed_everything(trainer.config)
                model = exact.model().to(world.device).train()
                whole, *halves = _halves(exact, world.device, part, trainer.config.seed, trainer.config.data.on_error)
                nature.still_random = _drawn(exact.loss, model, whole[0])
                _measure(nature, exact, model, whole, halves)
                break
            except Exception as error:
                if not double:
                    raise
                nature.double, nature.not_double = (
                    False,
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                )
    return nature


Batch = tuple[Any, int]  # with its number of samples


def _halves(
    task: Task, device: torch.device, part: int, seed: int, on_error: OnError, mixed: list[str] | None = None
) -> list[Batch]:
    """A batch of up to eight samples, and its two halves. `mixed` gets the generators that `collate` drew from."""
    data = task.train_data()
    count = min(8, part, len(data))  # type: ignore[arg-type]
    samples = readable(MicroBatches(data, task, seed, True, on_error), range(count), 0)
    count = len(samples)
    before = generators.states()
    cuts = [(task.collate(cut), len(cut)) for cut in (samples, samples[: count // 2], samples[count // 2 :]) if cut]
    if mixed is not None:
        mixed += [name for name, state in generators.states().items() if state != before[name]]
    return [(map_tensors(batch, lambda tensor: tensor.to(device)), size) for batch, size in cuts]


def _drawn(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> list[str]:
    """Sources of randomness in a forward pass."""
    before = generators.states()
    with Drawing() as mode, torch.no_grad():
        call(model, batch)
    after = generators.states()
    moved = [name for name in after if after[name] != before[name]]
    # Some operations, such as attention, could draw numbers and do not where their dropout is zero.
    return [name for name in moved if name != "torch"] + (
        list(dict.fromkeys(mode.found)) or ["torch"] if "torch" in moved else []
    )


def _measure(nature: Nature, task: Task, model: nn.Module, whole: Batch, halves: list[Batch]) -> None:
    """Whether the loss of each head is a sum over samples, with the same weights."""
    losses = by_head(task.loss(model, whole[0]))
    objective = total(losses)
    torch.autograd.backward(objective)
    nature.epsilon = torch.finfo(objective.dtype).eps
    if len(halves) < 2:
        return
    with torch.no_grad():
        parts = [by_head(task.loss(model, batch)) for batch, _ in halves]
    units = [units_of(task, [half]) for half in halves]
    for head, loss in losses.items():
        value, one, other = float(loss.detach()), *(float(part[head]) for part in parts)
        scale = max(abs(value), abs(one) + abs(other), 1e-30)
        coupling = abs(value - one - other) / scale
        nature.coupling = max(nature.coupling, coupling)
        # A mean over the head's units, or over samples, whatever the task counts.
        weights = [[count.get(head, count.get(SAMPLES, 0.0)) for count in units], [float(size) for _, size in halves]]
        means = [(one * w[0] + other * w[1]) / sum(w) for w in weights if sum(w)]
        if coupling > 1e-3 and any(abs(value - mean) / scale < 1e-3 for mean in means):
            nature.means.append(head)
