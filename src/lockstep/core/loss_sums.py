"""Sums of losses and units over steps. They are added one after the other, so a stop in between changes no bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.core import devices
from lockstep.core.evaluate import combine
from lockstep.core.parallel.world import World
from lockstep.core.step import SAMPLES, StepResult


@dataclass
class LossSums:
    """The sums of some steps, by head."""

    world: World
    steps: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)
    """For each of `World.data_ranks`."""
    units: dict[str, float] = field(default_factory=dict)
    """Of all ranks."""

    def add(self, results: Sequence[StepResult]) -> None:
        """Add steps. This waits for the device."""
        self.steps += len(results)
        values: list[Tensor] = []
        places: list[tuple[list[float], int]] = []
        for result in results:
            for head in result.totals.keys() - {SAMPLES}:  # a player of a task may have no turn in these steps
                self._begin(head)
            for by_head, counts, place in zip(result.losses, result.counted, result.places, strict=False):
                for head, value in by_head.items():
                    sums = self._begin(head)
                    if counts:
                        values.append(value)
                        places.append((sums, place))
            for head in dict.fromkeys(head for by_head in result.losses for head in by_head):
                self.units[head] += result.totals.get(head, result.totals.get(SAMPLES, 0.0))
        for (sums, place), number in zip(places, as_float64(values).tolist() if values else (), strict=True):
            sums[place] += number

    def _begin(self, head: str) -> list[float]:
        self.units.setdefault(head, 0.0)
        return self.losses.setdefault(head, [0.0] * len(self.world.data_ranks))

    def slots(self) -> list[float]:
        """The losses of this rank. `means` takes their sum over all ranks."""
        heads = sorted(self.losses)  # the same order on every rank
        return self.world.slots(
            [[self.losses[head][place] for head in heads] for place in range(len(self.world.data_ranks))]
        )

    def means(self, slots: Sequence[float], coefficients: Mapping[str, float]) -> dict[str, float]:
        """The mean losses; see `combine`."""
        totals = self.world.in_order(slots, len(self.losses))
        return combine(dict(zip(sorted(self.losses), totals, strict=True)), self.units, coefficients)

    def saved(self) -> dict[str, Any]:
        """The sums of all data ranks, as JSON, on rank 0; empty elsewhere. A collective."""
        gathered = self.world.gather_once(self.losses)
        if gathered is None:
            return {}
        losses = {head: [value for of_rank in gathered for value in of_rank[head]] for head in self.losses}
        return {"steps": self.steps, "losses": losses, "units": dict(self.units)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what `saved` returned. On a different number of data ranks, the first of them takes all."""
        self.steps, self.units = saved["steps"], dict(saved["units"])
        numbers = self.world.data_ranks
        for head, values in saved["losses"].items():
            if len(values) != self.world.data_size:
                values = [sum(values), *[0.0] * (self.world.data_size - 1)]
            self.losses[head] = values[numbers.start : numbers.stop]


def as_float64(values: list[Tensor]) -> Tensor:
    """Scalars as one tensor of float64: on the device of the first of them, or on the CPU if it has no float64.

    With offloaded parameters, losses are on the GPU and norms of gradients on the CPU.
    """
    place = values[0].device
    if not devices.of(place).has_float64:
        return torch.stack([value.float() for value in values]).cpu().double()
    if all(value.dtype == values[0].dtype and value.device == place for value in values):  # one conversion for all
        return torch.stack(values).double()
    return torch.stack([value.double().to(place) for value in values])
