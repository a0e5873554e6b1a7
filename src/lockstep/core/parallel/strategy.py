"""How a model is spread over ranks: what every strategy owes to training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.core.data import private_generators
from lockstep.core.data.randomness import SeededGenerator
from lockstep.core.errors import TrainingError
from lockstep.core.parallel.precision import Precision

Losses = dict[str, Tensor]
"""Loss sums by head: scalar tensors."""

_SUM = "return the SUM of the loss over its units: a scalar tensor, or a dict of scalar tensors by head"
_TUPLES = (
    "return the loss alone, or the pair (loss, output), where `output` is the result of `predict`: put several outputs "
    "into one tuple or dict. Several losses are a dict of scalar tensors by head"
)


@runtime_checkable
class CallsVary(Protocol):
    """A module of a model that calls its blocks as often as its batch requires, in training too.

    If a call is a collective, all ranks must call a block equally often. A strategy then replaces this attribute.
    The module calls it with its number of calls, and makes the calls that it lacks with zeros.
    """

    largest_over_ranks: Callable[[int], int]
    """From a number to the largest over all ranks. As the module is made: the number itself."""


@dataclass
class KeptOutput:
    """The output that `Task.loss` returns with the losses, of one call in training.

    Outputs do not pass through the wrappers: DDP and FSDP prepare a backward pass from all that a module returns. They
    are not attributes of the module either, because setting these takes longer.
    """

    is_wanted: bool = False
    """True if the next call keeps its output."""
    output: Any = None

    def take(self) -> Any:
        """The output of the last call, if it was to be kept. None: `loss` returned only the losses."""
        output, self.output, self.is_wanted = self.output, None, False
        return output


class Forward(nn.Module):
    """From a batch to the task's loss sums, as one module.

    DDP and FSDP wrap this module and not the model. The task's loss may then call the model several times, or use any
    of its methods and attributes, with the same meaning on one rank and on many.

    Args:
        loss: `Task.loss`.
        calls_vary: `Task.calls_vary`.
        is_bypassed: others call the model itself: what must happen around a forward pass belongs to the model.
        uses_graphs: the model may run as CUDA graphs. A graph writes its results into the same memory each time, so
            they are copied.
        tensor_plan: what `Task.tensor_plan` returns.
        holders: gives the objects, by name, that the loss uses besides the model: the task.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Any],
        *,
        calls_vary: bool = False,
        is_bypassed: bool = False,
        uses_graphs: bool = False,
        tensor_plan: Callable[[], Mapping[str, str] | None] = lambda: None,
        holders: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.calls_vary = calls_vary
        self.is_bypassed = is_bypassed
        self.uses_graphs = uses_graphs
        self.tensor_plan = tensor_plan
        self.holders = holders
        self.kept = KeptOutput()
        self._has_computed = False

    @functools.cached_property
    def private(self) -> list[SeededGenerator]:
        """The generators of the task and the model, which are seeded before each forward pass."""
        return private_generators.find(Task=getattr(self.loss, "__self__", self.loss), model=self.model)

    def forward(self, batch: Any, call: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Loss sums by head; a single loss is the head `loss`. With `call`: the result of `call(model, batch)`.

        Raises:
            TrainingError: in the first pass with gradients, the loss calls `backward()` itself.
        """
        if self.uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        is_first = not self._has_computed and torch.is_grad_enabled()
        self._has_computed = self._has_computed or is_first
        before = self._graded() if is_first else set()
        returned = self.loss(self.model, batch) if call is None else call(self.model, batch)
        if is_first and self._graded() - before:
            remedy = "only return the loss; for gradients of inputs use torch.autograd.grad(loss, inputs)"
            what = "it calls backward() itself, so the gradient would count twice"
            raise TrainingError(what, where="Task.loss", remedy=remedy)
        if self.uses_graphs:
            returned = tree_map_only(Tensor, torch.clone, returned)
        if call is not None:
            return returned
        losses, output = split_output(returned)
        if isinstance(output, Tensor) and output.ndim == 0:  # a second loss, which would not be trained
            raise TrainingError("it returned a tuple of two scalars", where="Task.loss", remedy=_TUPLES)
        if self.kept.is_wanted and self.model.training:
            self.kept.output = output
        return by_head(losses)

    def _graded(self) -> set[str]:
        """The names of the parameters that have gradients."""
        return {name for name, parameter in self.model.named_parameters() if parameter.grad is not None}


def private_of(forward: nn.Module) -> list[SeededGenerator]:
    """`Forward.private`. Empty: the module is only a model."""
    return forward.private if isinstance(forward, Forward) else []


@dataclass(frozen=True)
class TrialPass:
    """The arguments of a pass that is not part of the training."""

    batch: Callable[[], Any]
    """Gives a batch of this rank."""
    precision: Precision
    coefficients: Mapping[str, float]
    """See `TrainState.coefficients`."""

    @property
    def ignored_heads(self) -> list[str]:
        """Heads with coefficient 0, whose losses may be constants."""
        return [head for head, coefficient in self.coefficients.items() if not coefficient]


@dataclass(frozen=True)
class Waits:
    """When a rank waited for other ranks in the forward passes of a step."""

    ended: Any
    """A mark of the device before gradients are exchanged, see `Device.mark`."""
    between: list[tuple[Any, Any]] | None
    """Marks before and after each wait since the step began. None: it waited, and the times are not known."""


class Strategy(Protocol):
    """What the rest of the package may ask of a strategy. Nobody else looks at wrappers or at sharded modules.

    `factory.make_strategy` makes a strategy. First it builds the model, then it wraps the `Forward` of the model. After
    that it serves the training steps and the evaluations. A new strategy implements these attributes and methods in
    its own file; `Single` has a default for each, which is right if ranks share nothing.
    """

    is_sharded: bool
    """Each rank holds only some rows of each parameter. Every forward pass is then a collective, on all ranks alike."""

    trainable: dict[str, nn.Parameter]
    """The parameters, by name, whose gradients are exchanged. All others are frozen."""

    @property
    def divisor(self) -> int:
        """The number by which the exchange divides the sum of gradients: that of ranks. 1 if it does not divide."""
        ...

    @property
    def forward(self) -> nn.Module:
        """The module that a training step calls with a batch: the `Forward`, inside the wrapper if there is one."""
        ...

    @property
    def unwrapped(self) -> Forward:
        """The `Forward` inside the wrapper, or `forward` itself."""
        ...

    def build_model(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, list[str]]:
        """The model that `make` returns, placed as `wrap` expects it; and messages for the log.

        Raises:
            TrainingError: `make` returns different models on different ranks.
        """
        ...

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        """Spread `forward` over the ranks: from now on `self.forward` gives gradients that are the mean over ranks.

        After other parameters became trainable, it is called again with `self.unwrapped`.

        Args:
            forward: holds the model that `build_model` returned.
            blocks: the repeated blocks of the model, outermost first; they are the units of sharding.

        Raises:
            UsageError: the options do not fit the number of ranks or the model.
        """
        ...

    def begin_step(self, trial: TrialPass | None = None) -> Any:
        """Give every rank the buffers of rank 0 (such as BatchNorm statistics).

        Every step of training begins with that. So it changes no result, at whatever step it is also done before
        evaluating or saving: then without `trial`. The first calls of a process also look for replaced parameters.

        Args:
            trial: for passes that must be made once before the first step.

        Returns:
            a mark of the device, after which only this rank computes; see `Device.mark`. None on one rank.

        Raises:
            TrainingError: a parameter that the model had when it was wrapped has been replaced by a different object.
                The optimizer has the first object, so the new object would never be trained. Names the parameters.
        """
        ...

    def begin_shard(self, place: int, micro_batches: int) -> None:
        """Before the first pass of a shard of the global batch.

        Args:
            place: of the shard in `World.data_ranks`.
            micro_batches: in the shard.
        """
        ...

    def end_shards(self) -> None:
        """After the last pass of a step, outside of its contexts."""
        ...

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the passes of one micro-batch. Gradients travel only with the last micro-batch of a step."""
        ...

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        """Add the gradient of sum_k factors[k] * losses[k] to the parameters. With the last micro-batch of a step, the
        gradients become the mean over the ranks.

        Args:
            losses: by head.
            factors: by head; heads that are missing here take no part.

        Returns:
            with the last micro-batch, on several ranks: when this rank waited for others. Otherwise None.

        Raises:
            TrainingError: a parameter has no gradient, or changed whether it trains.
                Names the parameters.
        """
        ...

    def leaves(self) -> dict[str, Tensor]:
        """The whole parameters, by name, to which a backward pass gives gradients, before these are exchanged. With
        sharded parameters a collective, until each was gathered once."""
        ...

    def backward_alone(self, losses: Losses, factors: Losses) -> None:
        """A backward pass for those who look at the gradients of `leaves` by hooks: it exchanges and leaves none."""
        ...

    def inference(self) -> contextlib.AbstractContextManager[Forward]:
        """Around passes without gradient. Gives the `Forward`. If it is sharded, all ranks call it equally often.

        At the beginning and at the end, sharded parameters that are gathered are let go of: values that are set
        in between count, and no memory stays taken.
        """
        ...


def split_output(returned: Any) -> tuple[Any, Any]:
    """The losses and the output that `Task.loss` returned. The output is None if it returned only the losses."""
    return returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)


def by_head(losses: Any, where: str = "Task.loss") -> Losses:
    """The losses that a task returned, by head, in the order of the heads' names; a single loss is the head `loss`.

    Raises:
        TrainingError: `losses` is neither a scalar tensor of floating-point numbers nor a dict of such tensors.
    """
    if isinstance(losses, tuple):
        raise TrainingError(f"it returned a tuple of {len(losses)}", where=where, remedy=_TUPLES)
    heads: Mapping[Any, Any] = losses if isinstance(losses, Mapping) else {"loss": losses}
    if not heads:
        raise TrainingError("it returned an empty dict", where=where, remedy=_SUM)
    for head, value in heads.items():
        if isinstance(head, str) and isinstance(value, Tensor) and not value.ndim and value.is_floating_point():
            continue
        named = f"head {head!r} is" if isinstance(losses, Mapping) else "it returned"
        if not isinstance(head, str):
            raise TrainingError(
                f"a head is called {head!r}, a {type(head).__name__}", where=where, remedy="use text as keys"
            )
        if not isinstance(value, Tensor):
            shown = "" if value is None or isinstance(value, Mapping | list | tuple | set) else f" ({value!r})"
            raise TrainingError(f"{named} a {type(value).__name__}{shown}", where=where, remedy=_SUM)
        what = f"{named} a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
        raise TrainingError(what, where=where, remedy=_SUM)
    return {head: heads[head] for head in sorted(heads)}
