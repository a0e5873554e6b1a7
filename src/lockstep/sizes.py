"""Sizes as people write them."""

from __future__ import annotations

import re

from lockstep.core.errors import UsageError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
"""Bytes by the letters before the B, in capitals."""


def bytes_of(size: int | str, where: str) -> int:
    """Bytes of `80GB`, `79.6GiB`, `80000000000` or a number.

    Raises:
        UsageError: it is not a size, or less than a byte. `where` names the value.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    found = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if found < 1:
        raise UsageError(f"{size!r} is not a size", where=where, remedy="write a number with GB or GiB, such as 80GB")
    return found
