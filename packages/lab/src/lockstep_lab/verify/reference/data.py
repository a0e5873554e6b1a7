"""The samples of a plain loop, and the values that a task returned: losses by head, units by head."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.data import private_generators
from lockstep.core.task import Task, loss_of_batch
from lockstep_lab.verify.reference.order import seed_of

EVERY_HEAD = ""
"""Means all heads, if they have the same units."""


def read(
    task: Task,
    data: Any,
    indices: Iterable[int],
    *,
    epoch: int,
    training: bool,
    seed: int,
    skip: bool,
    words: Iterable[int] | None = None,
) -> list[Any]:
    """The samples at `indices`, prepared, each under its own seed in the generators of torch, NumPy and Python, and in
    those that the data and the task keep.

    Args:
        seed: of the run.
        skip: whether unreadable samples are left out.
        words: the last word of the seed of each sample. None: its index.
    """
    samples, indices = [], list(indices)
    private = private_generators.on_host(data=data, Task=task)
    for index, word in zip(indices, indices if words is None else words, strict=True):
        own = seed_of(seed, epoch, word)
        torch.default_generator.manual_seed(own)  # `torch.manual_seed` does the same on the CPU, 100 times slower
        random.seed(own)
        np.random.seed(own % (1 << 32))
        for generator in private:
            generator.seed(own)
        try:
            samples.append(task.prepare(data[index], epoch, training))
        except Exception:
            if not skip:
                raise
    return samples


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with `change` applied to each tensor in it: in mappings, lists, tuples, named tuples and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # some are also mappings
        parts = {field.name: mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors(value: Any) -> list[Tensor]:
    """The tensors in `value`, in the order of `mapped`."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, add)
    return found


def numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in float64, without its graph. A complex number has two, in a last dimension."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`."""
    return mapped(batch, lambda tensor: tensor.to(device))


def heads(returned: Any) -> dict[str, Tensor]:
    """The losses that `Task.loss` returned, by head. In evaluation it may return a pair of losses and output."""
    losses = returned[0] if isinstance(returned, tuple) else returned
    return dict(losses) if isinstance(losses, Mapping) else {"loss": losses}


def losses(task: Task, model: Any, batch: Any) -> dict[str, Tensor]:
    """The losses of a batch by head, as if it were the whole global batch."""
    return heads(loss_of_batch(task)(model, batch))


def count_units(task: Task, batches: Iterable[tuple[Any, int]]) -> dict[str, float]:
    """The units of batches, as `Task.weight` counts them: by default the samples.

    Args:
        batches: each with its number of samples.

    Returns:
        The units by head, or the units of every head under `EVERY_HEAD`. See `units_of`.
    """
    units: dict[str, float] = {}
    for batch, size in batches:
        weight = task.weight(batch)
        by_head = weight if isinstance(weight, Mapping) else {EVERY_HEAD: size if weight is None else weight}
        for head, value in by_head.items():
            units[head] = units.get(head, 0.0) + float(value)
    return units


def units_of(units: Mapping[str, float], head: str) -> float:
    """The units of a head, from what `count_units` returned."""
    return units.get(head, units.get(EVERY_HEAD, 0.0))
