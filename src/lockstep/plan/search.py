"""Which settings fit, how large their micro-batches may be, and which is recommended."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.estimate import Estimate
from lockstep.plan.model_facts import ModelFacts
from lockstep.plan.setting import PrecisionName, World


@dataclass(frozen=True)
class Option:
    """A strategy with a precision, at the largest micro-batch that fits."""

    name: str
    """Such as `fsdp + offload, bf16`."""
    estimate: Estimate | None
    """At the largest micro-batch that fits; at a micro-batch of 1, where none fits. None: the option cannot apply."""
    fits: bool | None
    """None: it is not known, because the memory of the GPU or the activations are not."""
    largest_micro_batch: int | None
    """None: not even one sample fits, or it is not known."""
    reason: str = ""
    """Why it cannot apply, or does not fit."""


@dataclass(frozen=True)
class Plan:
    """The answer of `lockstep plan`."""

    facts: ModelFacts
    world: World
    options: list[Option]
    recommended: Option | None
    reason: str
    """Why this option is recommended; or what to change first, where nothing fits."""
    keys: list[str]
    """Overrides of the config for the recommended option, such as `parallel.strategy=fsdp`."""
    reserve: float = 0.1
    """Share of the memory that stays free."""
    save_every_seconds: float | None = None
    """By Young and Daly; None without a failure rate."""


def search(
    facts: ModelFacts, world: World, *, precisions: tuple[PrecisionName, ...] = ("fp32", "bf16"), reserve: float = 0.1
) -> Plan:
    """All options in this world, each with the largest micro-batch that fits, and a recommendation."""
    raise NotImplementedError
