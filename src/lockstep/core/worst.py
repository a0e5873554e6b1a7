"""The samples of an evaluation whose outputs are most wrong, the same for every number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.core import devices
from lockstep.core.data.tensors import map_tensors
from lockstep.core.errors import number_of
from lockstep.core.parallel.world import World

Mistakes = Callable[[Any, Any], Tensor | None]
"""Gets the output and the batch. Returns how wrong the output of each sample is: see `Presenter.mistakes`."""
Split = Callable[[Any, int], list[Any]]
"""Splits the output of a batch into those of its samples: see `evaluate.split`."""


@dataclass(frozen=True)
class Worst:
    """A sample whose output is among the most wrong."""

    mistake: float
    """The mistake of the output, as a number. NaN became infinity."""
    index: int
    """The index of the sample."""
    output: Any
    """The output of the sample, on the CPU."""

    @property
    def order(self) -> tuple[float, int]:
        """The most wrong is first. Among equals, the sample with the lowest index is first."""
        return -self.mistake, self.index


class WorstSamples:
    """Collects the `count` most wrong samples of one evaluation. Each rank keeps at most as many outputs.

    What fails here does not end the evaluation: `problem` says it.

    Args:
        mistakes: is called with the output and the batch of each micro-batch.
    """

    def __init__(self, mistakes: Mistakes, *, count: int) -> None:
        self.mistakes, self.count = mistakes, count
        self.found: list[Worst] = []
        """The most wrong samples so far, in order. After `gather`: those of all ranks on rank 0, none elsewhere."""
        self.problem = ""
        """The failure of this rank; after `gather`, on any rank. An empty text: nothing."""

    def add(self, indices: tuple[int, ...], output: Any, batch: Any, split: Split) -> None:
        """Take the samples of a micro-batch. This waits for the device.

        Args:
            indices: of its samples.
        """
        if self.problem:
            return
        try:
            numbers = self.mistakes(output, batch)
            if numbers is not None:
                self._add(indices, output, _checked(numbers, len(indices)), split)
        except Exception as error:  # what is only shown must not end a training
            if devices.Device.is_shortage(error):
                raise
            self.problem = f"Presenter.mistakes failed: {type(error).__name__}: {error}"

    def _add(self, indices: tuple[int, ...], output: Any, numbers: list[float], split: Split) -> None:
        last = self.found[-1].order if len(self.found) == self.count else (math.inf, 0)
        orders = ((-number, index) for number, index in zip(numbers, indices, strict=True))
        better = sorted((order, place) for place, order in enumerate(orders) if order < last)[: self.count]
        if not better:
            return
        outputs = split(output, len(indices))
        # A view would keep the memory of its batch, and take it along to rank 0.
        new = [Worst(-order[0], order[1], map_tensors(outputs[place], Tensor.clone)) for order, place in better]
        self.found = sorted([*self.found, *new], key=lambda sample: sample.order)[: self.count]

    def gather(self, world: World) -> None:
        """Choose the most wrong samples of all ranks. Only their outputs travel to rank 0. All ranks call it."""
        told = world.gather_once((self.problem, [sample.order for sample in self.found]))
        orders = sorted(order for _, of_rank in told or () for order in of_rank)[: self.count]
        problem = next((text for text, _ in told or () if text), "")
        self.problem, chosen = world.broadcast((problem, set(orders)))
        gathered = world.gather_once([sample for sample in self.found if sample.order in chosen])
        self.found = sorted((sample for part in gathered or () for sample in part), key=lambda sample: sample.order)


def _checked(numbers: Any, count: int) -> list[float]:
    """The numbers of a batch, with infinity for NaN.

    Raises:
        ValueError: they are not `count` numbers.
    """
    if not isinstance(numbers, Tensor) or numbers.shape != (count,):
        what = f"a tensor of shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(
            f"it returned {what} for {number_of(count, 'sample')}; it must be a tensor of shape ({count},)"
        )
    return [math.inf if math.isnan(number) else number for number in numbers.detach().tolist()]
