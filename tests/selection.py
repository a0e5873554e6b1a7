"""Which cases of a test `make test` leaves to `make test-all`, because the kept cases run the same code."""

from collections.abc import Iterable
from typing import Any

import pytest


def mainly(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases in their order; those that are not `kept` run with `make test-all` alone."""
    kept, cases = list(kept), list(cases)
    assert all(case in cases for case in kept), "a kept case does not exist"
    return [case if case in kept else _left_out(case) for case in cases]


def _left_out(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
