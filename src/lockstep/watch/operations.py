"""Where do two passes first differ? The operations of both are compared by digests of their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.parts.operations import Results, caller, place_of

_FOLDERS = tuple(str(Path(__file__).parents[1] / name) for name in ("core", "parts", "watch"))


def _place() -> str:
    """File and line of the code that calls an operation."""
    frame = caller(_FOLDERS)
    return place_of(caller(()) if frame.f_back is None else frame)


def first_difference(one: Callable[[], object], other: Callable[[], object]) -> str:
    """The first operation whose result differs between two passes, as `name at file:line`; empty if none does."""
    records = []
    for call in (one, other):
        with Results(_place) as operations:
            call()
        records.append(operations.found)
    for (name, place, digests), (name2, place2, digests2) in zip(*records, strict=False):
        name, name2 = name.removeprefix("aten::"), name2.removeprefix("aten::")
        if name != name2 or digests != digests2:
            return f"{name} at {place}" if name == name2 else f"{name} at {place}, or {name2} at {place2}"
    return "" if len(records[0]) == len(records[1]) else "an operation that only one of the two passes makes"
