"""Weights of classes in the loss, on the device of the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.core.errors import UsageError


def class_weights(
    wanted: str | Mapping[str, float] | None, labels: Sequence[str], count: Callable[[], Mapping[str, int]]
) -> Tensor | None:
    """The weight of each class: (classes,) float32. None: all weights are 1.

    Args:
        wanted: `balanced`, or weights by class; all other classes have the weight 1.
        labels: names of the classes.
        count: returns the number of training samples of each class, for `balanced`: the weight of a class is the number
            of samples / (the number of classes x its samples). A class without training samples has the weight 1.

    Raises:
        UsageError: a class does not exist.
    """
    if wanted is None:
        return None
    if isinstance(wanted, str):
        counts = count()
        total = sum(counts.values())
        return torch.tensor([total / (len(labels) * counts[label]) if counts[label] else 1.0 for label in labels])
    unknown = [name for name in wanted if name not in labels]
    if unknown or not wanted:
        what = f"no such label: {', '.join(map(repr, unknown)) or repr(wanted)}"
        raise UsageError(what, where="task.class_weights", remedy=f"use balanced, or weights for: {', '.join(labels)}")
    return torch.tensor([float(wanted.get(label, 1.0)) for label in labels])


class OnDevice:
    """A tensor on the CPU, with a cached copy on the device: copying in every step would wait for the device."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self._copy = tensor

    def like(self, other: Tensor) -> Tensor | None:
        """The tensor on the device of `other`, in its number format, except for 16-bit formats, which would round
        it."""
        if self.tensor is None or self._copy is None:
            return None
        dtype = torch.promote_types(other.dtype, torch.float32)
        if (self._copy.device, self._copy.dtype) != (other.device, dtype):
            self._copy = self.tensor.to(device=other.device, dtype=dtype, non_blocking=True)
        return self._copy
