"""The energy and the price of a training, from its time. They are only as good as the time, the watts and the price."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.plan.estimate import Estimate

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


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
