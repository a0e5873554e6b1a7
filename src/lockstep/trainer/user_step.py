"""`LoopStep`: one step of a user's own loop."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lockstep.core import keywords
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import UsageError
from lockstep.core.loop import NextStep
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.step import Call, StepResult, TrainState, exact_step
from lockstep.trainer.user_loop_task import zero_loss
from lockstep.updates.players import Turns

T = TypeVar("T")


class LoopStep:
    """One global batch and one update. `Loop` makes it; iterate over it to get this rank's micro-batches.

    Attributes:
        number: of this step, from 1.
        epoch: of its samples, from 0.
        ends_epoch: True if it has the last samples of its epoch.
        is_last: True if the training ends after it.
    """

    def __init__(
        self,
        state: TrainState,
        asked: NextStep,
        *,
        steps_per_epoch: int,
        stop: int,
        counts_late: bool,
        begins: Callable[[], None],
        updated: Callable[[StepResult], None],
        turns: Turns | None = None,
    ) -> None:
        self.number = state.step + 1
        self.epoch = state.step // steps_per_epoch
        self.ends_epoch = self.number % steps_per_epoch == 0
        self.is_last = self.number >= stop
        self.result: StepResult | None = None
        """None until the update is done."""
        self._state, self._asked, self._turns = state, asked, turns
        self._active = state  # that of the player whose turn it is, if there are several optimizers
        self._heads: list[str] = []  # of the turns so far
        self._whole: StepResult | None = None  # to which the turns add
        self._begins, self._updated, self._counts_late = begins, updated, counts_late
        self._update: Generator[MicroBatch | None, Call | None, Any] | None = None
        self._begun = False
        self._current: Any = None  # the micro-batch that has no backward pass yet
        self._at = 0  # its number, from 1
        self._in_body = False
        self._gradient: tuple[nn.Parameter, Tensor, int] | None = None  # of one parameter, and how often it was changed

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches, on its device. When they are used up, the update is made."""
        where, asked = f"step {self.number}", self._asked
        if self._turns is not None:
            names = " and ".join(repr(player.name) for player, _ in self._turns.states)
            remedy = f"say whose turn it is: for batch in step.turn(...), with {names}"
            raise UsageError("this Loop has several optimizers", where=where, remedy=remedy)
        if self._begun:
            remedy = "iterate once over the micro-batches of a step"
            raise UsageError("its micro-batches were read before", where=where, remedy=remedy)
        update = exact_step(
            self._state,
            asked.micro_batches,
            asked.samples,
            want_norm=asked.want_norm,
            counts_late=self._counts_late,
        )
        self.result = yield from self._driven(update)
        assert self.result is not None
        self._updated(self.result)

    @partial(keywords.checked, name="step.turn")
    def turn(self, name: str) -> Iterator[Any]:
        """This rank's micro-batches for an update of one of several optimizers. All other parameters are frozen.

        Call it once for each update. The micro-batches of a step are the same in all its turns.

        Args:
            name: of the optimizer, in the dict that the Loop was given.

        Raises:
            UsageError: there is no such optimizer, or another turn has not ended.
        """
        turns, state = self._turns, self._state
        names = [] if turns is None else [player.name for player, _ in turns.states]
        if turns is None or name not in names:
            has = (
                f"the Loop has {' and '.join(map(repr, names))}"
                if names
                else "the Loop has one optimizer, without a name"
            )
            remedy = "give several: Loop(models, {'generator': optimizer, 'critic': other}, ...)"
            raise UsageError(has, where=f"step {self.number}, step.turn({name!r})", remedy=remedy)
        if self._update is not None:
            raise self.incomplete()
        self._whole = self._whole or turns.begin(state, self._asked.samples)
        self.result, self._active = None, turns.states[names.index(name)][1]
        batches = [replace(one, weights=None) for one in self._asked.micro_batches]
        self._heads.append(name)
        number, place = self._heads.count(name) - 1, names.index(name)
        wanted = {"want_norm": self._asked.want_norm, "counts_late": self._counts_late}
        yield from self._driven(turns.turn(state, batches, self._whole, place=place, number=number, **wanted))
        self.result = self._whole

    def finished(self) -> StepResult | None:
        """The result of the step, when its body has ended. None: its update was not made."""
        if self._turns is not None and self.result is not None:
            self._turns.end(self._state, self.result)
        return self.result

    def _driven(self, update: Generator[MicroBatch | None, Call | None, T]) -> Generator[Any, None, T]:
        """The micro-batches of an update, and what the update returns."""
        self._begun, self._update, self._at = True, update, 0
        self._begins()
        for group in self._state.optimizer.param_groups:  # the script may have made its own backward pass before
            for parameter in group["params"]:
                parameter.grad = None
        try:
            try:
                next(update)
                while True:
                    asked = next(update)
                    assert asked is not None
                    self._current, self._at = asked, self._at + 1
                    self._in_body = True
                    yield asked.batch
                    self._in_body = False
                    if self._current is not None:
                        raise self._no_backward()
                    self._check_gradient()
            except StopIteration as end:
                self._update = None
                found: T = end.value
                return found
        finally:
            self._gradient = None
            update.close()  # an exception or a break left it: the contexts of its forward pass end

    @partial(keywords.checked, name="step.backward")
    def backward(
        self, loss: Tensor, *, units: float | Tensor | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        """The backward pass of the loss of this micro-batch. Call it once for each micro-batch.

        The gradient of the step is that of the sum of the loss over all units of the global batch, divided by their
        number: a mean over all samples (or tokens, or pixels), however they are spread over ranks and micro-batches.

        Args:
            loss: a scalar.
            units: how many samples (or valid labels, tokens, pixels) `loss` is the mean of, or the sum. None: the
                samples of the micro-batch. 0: the micro-batch does not count.
            reduction: whether `loss` is the `mean` over the units, or their `sum`.

        Raises:
            UsageError: it was called before for this micro-batch, or the loss is not a scalar with a gradient.
        """
        micro_batch, where = self._current, f"step {self.number}, step.backward"
        if micro_batch is None:
            what = (
                "it was called outside of `for batch in step`"
                if not self._at
                else "it was called twice for a micro-batch"
            )
            remedy = "call it once for each micro-batch, with the sum of the losses: step.backward(loss_a + loss_b)"
            raise UsageError(what, where=where, remedy=remedy)
        if reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={reduction!r}", where=where, remedy="use 'mean' or 'sum'")
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            remedy = "give a scalar: loss.mean(), or loss.sum() with reduction='sum'"
            raise UsageError(f"the loss is {shown}", where=where, remedy=remedy)
        if not loss.requires_grad:
            remedy = "compute it from the output of loop.model, without detach(), .item() or torch.no_grad()"
            raise UsageError("the loss depends on no trainable parameter", where=where, remedy=remedy)
        head = self._heads[-1] if self._heads else "loss"
        if self._counts_late:
            count = _number(units, where) if units is not None else float(len(micro_batch.indices))
            micro_batch.weights = {head: 0.0 if micro_batch.filler else count}
        else:  # Loop(units=...) has counted them
            count = sum((micro_batch.weights or {}).values())
            if units is not None and not micro_batch.filler and (given := _number(units, where)) != count:
                what = f"units={given:g}, but Loop(units=...) counts {count:g} for this batch"
                raise UsageError(what, where=where, remedy="leave units out of one of them")
        total = loss if reduction == "sum" else loss * count
        has_mean = bool(count) or bool(total.isfinite())  # a mean over no unit is NaN
        if not has_mean and self._state.strategy.is_sharded:
            remedy = "give the sum: step.backward(loss, units=n, reduction='sum')"
            raise UsageError(f"the loss is {float(loss)} with units=0", where=where, remedy=remedy)

        def losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {head: total if has_mean else zero_loss(model)}

        self._check_gradient()
        self._current = None
        assert self._update is not None
        self._update.send(losses)
        parameters = self._active.strategy.trainable.values()
        with_gradient = ((each, each.grad) for each in parameters if each.grad is not None)
        first = next(with_gradient, None)
        self._gradient = None if first is None else (*first, local(first[1])._version)

    def refuse_update(self) -> None:
        """Raise a UsageError if the body, and not the engine, makes an update."""
        if self._in_body:
            raise UsageError(
                "the body called optimizer.step()",
                where=f"step {self.number}",
                remedy="leave it out: the update is made when the micro-batches of the step are used up",
            )

    def _check_gradient(self) -> None:
        """An accumulated gradient that the body clears or scales would give a different update without a word."""
        if self._gradient is None:
            return
        parameter, gradient, version = self._gradient
        if parameter.grad is not gradient or local(gradient)._version != version:
            raise UsageError(
                "the body cleared or changed the gradients after step.backward",
                where=f"step {self.number}",
                remedy="leave out zero_grad(), backward() and clip_grad_norm_(): each update begins without gradients, "
                "and Loop(clip_norm=...) clips the gradient of the whole global batch",
            )

    def _no_backward(self) -> UsageError:
        return UsageError(
            f"micro-batch {self._at} of {len(self._asked.micro_batches)} had no backward pass",
            where=f"step {self.number}",
            remedy="call step.backward(loss) for each micro-batch: other ranks wait for it. With units=0 it does not "
            "count",
        )

    @property
    def has_begun(self) -> bool:
        """Whether the body has asked for a micro-batch."""
        return self._begun

    def incomplete(self) -> UsageError:
        """The error about a body that did not go through all micro-batches."""
        what = (
            "its micro-batches were not read"
            if not self._begun
            else f"only {self._at} of {len(self._asked.micro_batches)} were read"
        )
        return UsageError(
            f"the body of the loop ended before the update: {what}",
            where=f"step {self.number}",
            remedy="write `for batch in step:` inside of `for step in loop:`, and do not leave it with break",
        )


class StepsOfEpoch:
    """The steps of an epoch, from `first`. `rest` gives the next steps."""

    def __init__(self, first: LoopStep, rest: Iterator[LoopStep]) -> None:
        self.step, self.rest, self.is_done = first, rest, False

    def __iter__(self) -> Iterator[LoopStep]:
        while True:
            yield self.step
            if self.step.result is None:
                raise self.step.incomplete()
            if self.step.ends_epoch or self.step.is_last:
                break
            try:
                self.step = next(self.rest)
            except StopIteration:  # the training has ended within the epoch
                break
        self.is_done = True


def _number(units: Any, where: str) -> float:
    value = (
        float(units) if isinstance(units, numbers.Real) or (isinstance(units, Tensor) and units.numel() == 1) else -1.0
    )
    if not 0 <= value < torch.inf:
        raise UsageError(f"units={units!r}", where=where, remedy="give the number of units: 0 or more")
    return value
