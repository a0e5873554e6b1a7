"""Questions that ask for the same event within different times, such as `death_1y`, `death_3y` and `death_6y`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAME = re.compile(
    r"(?P<outcome>.*[^\d. _-])[ _-]*(?P<years>\d+(?:\.\d+)?)[ _-]?(?:y|yr|yrs|year|years)", re.IGNORECASE
)


def outcomes_of(questions: Sequence[str]) -> dict[str, dict[float, int]]:
    """The outcomes that questions ask for, from names such as `death_3y`.

    Returns:
        by name of the outcome, the place of the question for each horizon in years, ascending. Questions whose name has
        no horizon are left out.
    """
    found: dict[str, dict[float, int]] = {}
    for place, question in enumerate(questions):
        match = _NAME.fullmatch(question)
        if match:
            found.setdefault(match["outcome"], {})[float(match["years"])] = place
    return {name: dict(sorted(places.items())) for name, places in found.items()}
