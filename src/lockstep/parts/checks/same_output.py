"""A check that `Task.loss` in evaluation returns the output of `Task.predict`, as metrics assume."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.data.randomness import seed_forward
from lockstep.core.errors import UsageError, number_of
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.strategy import private_of, split_output
from lockstep.core.parallel.world import World
from lockstep.core.task import Task, needs_global_batch


def check_same_output(
    task: Task, forward: nn.Module, batch: Any, *, precision: Precision, world: World, near: float
) -> None:
    """Compare the output of `Task.loss` in evaluation with that of `Task.predict`, for a batch. All ranks call it.

    Outputs that depend on random numbers are not compared. A task may have no `predict`.

    Args:
        forward: a `Forward`, in evaluation mode.
        near: difference that rounding explains, as a fraction of the largest value.

    Raises:
        UsageError: the outputs differ. Names the part that differs.
    """

    def outputs(model: nn.Module, batch: Any, seed: int) -> tuple[Any, Any]:
        seed_forward(seed, precision.device, private_of(forward))
        _, of_loss = (None, None) if needs_global_batch(task) else split_output(task.loss(model, batch))
        seed_forward(seed, precision.device, private_of(forward))
        try:
            return of_loss, task.predict(model, batch)
        except UsageError:  # the default: there is no `predict`
            return of_loss, of_loss

    def run(seed: int) -> tuple[Any, Any]:
        with precision.autocast():
            return forward(batch, lambda model, batch: outputs(model, batch, seed))  # type: ignore[no-any-return]

    first = run(0)
    found = difference(*first, near=near)
    if not any(world.all_sum([float(found is not None)])):
        return
    again = run(1)  # on all ranks if any found a difference: a sharded model needs all ranks
    if found is None or any(difference(one, other, near=near) for one, other in zip(first, again, strict=True)):
        return
    raise UsageError(
        f"in evaluation, `loss` returns a different output than `predict` for the same batch: {found}",
        where="Task.loss, Task.predict",
        remedy="return the pair (loss, output of `predict`) from `loss` if not model.training, or only the loss",
    )


def difference(one: Any, other: Any, *, near: float, name: str = "the output") -> str | None:
    """The difference of two outputs, in words. None if they are equal up to rounding.

    Tensors, arrays and numbers are compared, also in mappings, tuples and lists. Other values are not.

    Args:
        near: what rounding explains: for fractions the difference, as a fraction of the largest value; for other
        numbers the fraction of numbers that differ.
        name: name of the outputs, for the words.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{name} has the keys {list(one)}, and {list(other)}"
        pairs = [(one[key], other[key], f"output {key!r}") for key in one]
    elif isinstance(one, tuple | list) and isinstance(other, tuple | list):
        if len(one) != len(other):
            return f"{name} has {number_of(len(one), 'part')}, and {len(other)}"
        pairs = [(*parts, f"output {number}") for number, parts in enumerate(zip(one, other, strict=True))]
    else:
        return _difference_of_numbers(one, other, near=near, name=name)
    return next((text for *parts, inner in pairs if (text := difference(*parts, near=near, name=inner))), None)


def _difference_of_numbers(one: Any, other: Any, *, near: float, name: str) -> str | None:
    kinds = (Tensor, np.ndarray, numbers.Number)
    if not isinstance(one, kinds) or not isinstance(other, kinds):
        return None if type(one) is type(other) else f"{name} is a {type(one).__name__}, and a {type(other).__name__}"
    first, second = (torch.as_tensor(value).detach().cpu() for value in (one, other))
    if first.shape != second.shape:
        return f"{name} has the shape {tuple(first.shape)}, and {tuple(second.shape)}"
    if not (first.is_floating_point() and second.is_floating_point()):  # such as class numbers
        different = int((first != second).sum())
        return f"{name} differs in {different} of {first.numel()} values" if different > near * first.numel() else None
    first, second = (value.double().nan_to_num(0.0, posinf=0.0, neginf=0.0) for value in (first, second))
    size, apart = (
        float(value.abs().max()) if value.numel() else 0.0 for value in (torch.stack([first, second]), first - second)
    )
    return f"{name} differs by up to {apart:.3g}, among values up to {size:.3g}" if apart > near * size else None
