"""Find out, from a few samples, what a LightningModule's steps log and what their means are averaged over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.core import metric_sync
from lockstep.core.data.randomness import seed_all
from lockstep_recipes.adapters import units
from lockstep_recipes.adapters.logged import StepLog
from lockstep_recipes.adapters.units import Given, Path

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass
class ProbedStep:
    """What samples revealed about one step."""

    units: dict[str, Any] = field(default_factory=dict)
    """By name of a value (empty: the loss), the unit that it is averaged over. None: the user gives its weight."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """The metrics that it logs, by name."""
    with_ignored: set[Path] = field(default_factory=set)
    """The places in its batches that contain the label -100."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log."""


def tried(
    module: nn.Module,
    samples: Sequence[Any],
    collate: Callable[[list[Any]], Given],
    run: Callable[[Any, Given], tuple[Tensor | None, StepLog]],
    *,
    own: Any,
    training: bool,
    where: str,
) -> ProbedStep:
    """Run samples through a step, as one batch and split in two, in evaluation mode on the CPU.

    Args:
        module: its matrices are scaled, and restored afterwards.
        run: the step, for a module and a batch.
        own: the unit of the loss that the user gave. None: find it.
        training: whether it is `training_step`, whose loss must have a unit.
        where: the line of the step, for errors.

    Raises:
        UsageError: the unit of the loss cannot be determined.
    """
    found, fixed, rounding = ProbedStep(), dict[str, Any](), units.Rounding()

    def measured(part: Sequence[Any]) -> tuple[Given, dict[str, float]]:
        seed_all(0)
        given = collate(list(part))
        seed_all(0)
        with rounding:
            loss, record = run(module, given)
        found.metrics |= {name: copy.deepcopy(metric) for name, metric in record.metrics.items()}
        values = {name: float(value) for name, (value, size) in record.values.items() if size is None}
        fixed.update({name: None for name, (_, size) in record.values.items() if size is not None})
        return given, values | ({} if loss is None else {"": float(loss)})

    def trial() -> units.HalvesTrial:
        cut = [(measured(samples[:place]), measured(samples[place:])) for place in units.cuts(len(samples))]
        return units.HalvesTrial(measured(samples), cut)

    fits, last = units.settled(module, trial, rounding)
    found.units = {name: fits.unit(name) for name in last.whole[1]}
    found.with_ignored = units.with_ignored(last.whole[0].batch)
    if own is not None:
        found.units[""] = own
    elif training:
        found.units[""] = units.of_loss(fits, last, where, near=rounding.near)
        found.notes.append(
            f"the loss of training_step is a mean over {found.units['']}, as {len(samples)} samples show"
        )
    elif "" in found.units and found.units[""] is None:
        found.notes.append(
            f"{where}: the loss is not a mean over samples or labels, so eval/loss depends on batch.micro"
        )
    for name in [name for name, unit in found.units.items() if unit is None]:
        found.units[name] = units.SAMPLES
        if name:
            found.notes.append(
                f"{where}: {name!r} is not a mean over samples or labels: Lockstep logs its mean over micro-batches, "
                "which depends on batch.micro; for an exact value log a torchmetrics metric"
            )
    for name, metric in found.metrics.items():
        if training and not metric_sync.has_fixed_size(metric):
            found.notes.append(
                f"{where}: {name!r} is not logged during training, because a {type(metric).__name__} keeps all "
                "samples: log it in validation_step, or give it a state of fixed size, for example with "
                "thresholds=100"
            )
    found.units |= fixed
    return found
