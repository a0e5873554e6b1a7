"""The energy and the price of a training, from its time. They are only as good as the time, the watts and the price."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan.estimate import Estimate
from lockstep.plan.search import Plan

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Rates:
    """What a GPU takes while it trains."""

    watts: float | None = None
    """Power of one GPU with its share of the machine and of the cooling. None: no energy is computed."""
    price_per_gpu_hour: float | None = None
    """In any currency. None: no price is computed."""

    def __post_init__(self) -> None:
        for option, value in (("--watts", self.watts), ("--price-per-gpu-hour", self.price_per_gpu_hour)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{value:g} is not above 0", where=option, remedy="give a number such as 700 or 2.5")

    @property
    def given(self) -> bool:
        """Whether there is anything to compute."""
        return self.watts is not None or self.price_per_gpu_hour is not None


@dataclass(frozen=True)
class Cost:
    """Of a time on all GPUs of a training."""

    gpu_hours: float
    kilowatt_hours: float | None
    price: float | None

    def text(self) -> str:
        """For people, such as `512 GPU hours, 358 kWh, 1,280`."""
        parts = [f"{_short(self.gpu_hours)} GPU hours"]
        parts += [f"{_short(self.kilowatt_hours)} kWh"] if self.kilowatt_hours is not None else []
        parts += [f"price {self.price:,.2f}"] if self.price is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Costs:
    """Of an option."""

    epoch: Cost | None
    """None: the time of an epoch is not known."""
    training: Cost | None
    """None: the time of the training is not known."""


def cost(seconds: float, gpus: int, rates: Rates) -> Cost:
    """What `gpus` GPUs take for `seconds`."""
    hours = seconds / _HOUR_S * gpus
    return Cost(
        gpu_hours=hours,
        kilowatt_hours=None if rates.watts is None else hours * rates.watts / 1000,
        price=None if rates.price_per_gpu_hour is None else hours * rates.price_per_gpu_hour,
    )


def costs(estimated: Estimate, rates: Rates) -> Costs:
    """What an epoch and the whole training take in the setting of an estimate."""
    gpus = estimated.setting.world.gpus
    epoch, training = estimated.epoch_seconds, estimated.training_seconds
    return Costs(
        epoch=None if epoch is None else cost(epoch, gpus, rates),
        training=None if training is None else cost(training, gpus, rates),
    )


def text(plan: Plan, rates: Rates) -> str:
    """The costs of all options that fit, as lines for people."""
    lines, wide = [], max((len(option.name) for option in plan.options), default=0)
    for option in plan.options:
        if option.estimate is None or option.fits is False:
            continue
        found = costs(option.estimate, rates)
        if found.epoch is None:
            continue
        whole = f"; the training {found.training.text()}" if found.training else ""
        mark = "*" if option is plan.recommended else " "
        lines.append(f"{mark} {option.name:<{wide}}  an epoch {found.epoch.text()}{whole}")
    if not lines:
        return (
            "energy and price: not known, because the time is not. It needs --gpu NAME, data with a known length, and "
            "with several GPUs a bandwidth"
        )
    return "\n".join([f"energy and price, at {plan.world.utilisation:.0%} of the GPU's peak:", *lines])


def add_to_json(values: dict[str, Any], plan: Plan, rates: Rates) -> None:
    """Add `cost` to each option in the plan as JSON values. None, where the time is not known."""
    for option, shown in zip(plan.options, values["options"], strict=True):
        shown["cost"] = None if option.estimate is None else asdict(costs(option.estimate, rates))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
