"""The answers of a task that is asked twice: for a model, and for the loss or output of the same batch."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.parallel.pretended import pretended_world
from lockstep_lab.verify import generators
from lockstep_lab.verify.comparable_task import buffers_put_back
from lockstep_lab.verify.reference import data

_SEED = 1
_SAME = 1e-6  # relative; kernels of a GPU may add in another order
_REPEATS = 3  # a value that depends on the clock may be equal once


def model_difference(make: Callable[[], nn.Module], first: nn.Module, loss: Callable[[nn.Module], Any]) -> str:
    """The difference of a second model from `first`, which was made with the same seed; empty if there is none.

    Numbers that modules hold besides tensors may be counters. So they matter only if they change the loss.

    Args:
        make: restores the generators to their state for `first`, and makes a model.
        loss: of some batch.
    """
    second = make()
    tensors, others = _tensors(first), _tensors(second)
    for name in sorted(tensors.keys() ^ others.keys()):
        return f"only one of two models that were made with the same seed has {name}"
    for name, tensor in tensors.items():
        other = others[name]
        if tensor.shape != other.shape or not torch.equal(tensor, other):
            return (
                f"the initial weights differ between two models that were made with the same seed, first in {name}: "
                "Task.model draws numbers that the seed does not determine, such as those of the clock"
            )

    def call(model: nn.Module, batch: None) -> Any:
        return loss(model)

    if differs(call, first, None):  # the loss is at fault, not the model
        return ""
    losses = [_numbers(call, model, None) for model in (first, second)]
    if not _are_different(*losses):
        return ""
    facts, other_facts = dict(_facts(first)), dict(_facts(second))
    for name, value in facts.items():
        if name in other_facts and value != other_facts[name]:
            return f"{name} is {value} in one model and {other_facts[name]} in another that was made with the same seed"
    return f"two models that were made with the same seed have the losses {_words(*losses)} for the same batch"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _facts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The numbers and truth values that modules hold besides tensors, among them `training`, by name."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            is_nan = isinstance(value, float) and math.isnan(value)
            if isinstance(value, bool | int | float) and not is_nan:
                yield f"{name}.{key}".removeprefix("."), value


def differs(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> str:
    """The difference of two results of `call` for the same batch and generator states; empty if they are equal."""
    numbers = [_numbers(call, model, batch) for _ in range(_REPEATS)]
    other = next((one for one in numbers[1:] if _are_different(numbers[0], one)), None)
    return "" if other is None else _words(numbers[0], other)


def depends_on_rank(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> str:
    """The difference of the losses that `call` returns on rank 0 and on rank 1; empty if they are equal.

    The environment variable RANK gives the rank, and so does torch's process group, if torch can simulate two ranks.
    The loss must not make collectives.

    Parameters that get a nonzero gradient on only one rank are also named.
    """
    found, used = [], []
    for rank in (0, 1):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with _environment(**variables), pretended_world(2, rank), unchanged_buffers(model):
            generators.disturb(_SEED)
            losses = list(data.heads(call(model, batch)).values())
        found.append([loss.detach().cpu().double() for loss in losses])
        used.append(_used(losses, model))
    words = [_words(*found)] if _are_different(*found) else []
    for name in sorted(used[0] ^ used[1])[:1]:
        words.append(f"{name} is unused only on rank {1 if name in used[0] else 0}")
    return "; ".join(words)


def _used(losses: list[Tensor], model: nn.Module) -> set[str]:
    """Names of the parameters with a nonzero gradient."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    reached = [loss for loss in losses if loss.requires_grad]
    if not reached:
        return set()
    grads = torch.autograd.grad(reached, list(parameters.values()), allow_unused=True)
    return {name for name, grad in zip(parameters, grads, strict=True) if grad is not None and bool(grad.any())}


def _numbers(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> list[Tensor]:
    generators.disturb(_SEED)
    with unchanged_buffers(model), torch.no_grad():
        found = data.tensors(call(model, batch))
    return [tensor.detach().cpu().double() for tensor in found if tensor.is_floating_point()]


def _are_different(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) != len(second) or any(
        one.shape != other.shape or not torch.allclose(one, other, rtol=_SAME, atol=1e-12, equal_nan=True)
        for one, other in zip(first, second, strict=True)
    )


def _words(first: list[Tensor], second: list[Tensor]) -> str:
    """The first numbers that differ."""
    for one, other in zip(first, second, strict=False):
        if one.shape == other.shape:
            differing = ~torch.isclose(one, other, rtol=_SAME, atol=1e-12, equal_nan=True)
            if bool(differing.any()):
                return f"{float(one[differing].flatten()[0]):.6g} and {float(other[differing].flatten()[0]):.6g}"
    return "tensors of different shapes"


def unchanged_buffers(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Restores the model's buffers afterwards. Spectral norm changes its buffers."""
    return buffers_put_back(model, [name for name, _ in model.named_buffers()])


@contextlib.contextmanager
def _environment(**variables: str) -> Generator[None, None, None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
