"""Energy and price."""

import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.plan.show import GpuRates, cost, cost_text


def test_energy_and_price_of_gpu_hours():
    found = cost(7200.0, 8, GpuRates(watts=700, price_per_gpu_hour=2.5))
    assert found == {"gpu_hours": 16, "kilowatt_hours": pytest.approx(11.2), "price": pytest.approx(40)}
    assert cost_text(found) == "16 GPU hours, 11.2 kWh, price 40.00"


def test_only_what_is_given_is_computed():
    assert cost_text(cost(3600.0, 1, GpuRates(watts=100))) == "1 GPU hours, 0.1 kWh"
    assert cost_text(cost(3600.0, 1000, GpuRates(price_per_gpu_hour=2))) == "1,000 GPU hours, price 2,000.00"


@pytest.mark.parametrize("rates", [{"watts": 0}, {"watts": -1}, {"price_per_gpu_hour": float("nan")}])
def test_rates_that_are_none(rates):
    with pytest.raises(UsageError, match="is not above 0"):
        GpuRates(**rates).check()
