"""Numeric answers: extract the answer of a text, and compare two texts."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARK = "####"  # before the result, in data such as GSM8K


def number_in(text: str) -> float | None:
    """The number that a text gives as its answer: the first after ####, otherwise the last. None: there is no
    number."""
    _, mark, behind = text.rpartition(_MARK)
    found = _NUMBER.findall(behind)
    return float(found[0 if mark else -1].replace(",", "")) if found else None


def is_match(written: str, answer: str) -> bool:
    """True if both texts give the same number."""
    number = number_in(answer)
    return number is not None and number_in(written) == number
