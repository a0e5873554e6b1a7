"""How the newest collectives of ranks differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LONGEST = 4
_RANKS = 8


def differences(last: Mapping[int, dict[str, Any]]) -> list[str]:
    """Differences between the newest collectives of the ranks of a group.

    Args:
        last: by rank, a collective with `number`, `name`, `sizes` and `dtypes`.
    """
    newest = max(entry["number"] for entry in last.values())
    behind: dict[int, list[int]] = {}
    for rank, entry in last.items():
        if entry["number"] < newest:
            behind.setdefault(entry["number"], []).append(rank)
    ahead = [rank for rank, entry in last.items() if entry["number"] == newest]
    lines = [
        f"{_ranks(ranks)} made only {number} collectives, and {_ranks(ahead)} made {newest}: "
        f"{_ranks(ranks)} did not reach {last[ahead[0]]['name']} {newest}"
        for number, ranks in behind.items()
    ]
    kinds: dict[str, list[int]] = {}
    for rank in ahead:
        kinds.setdefault(_what(last[rank]), []).append(rank)
    if len(kinds) > 1:
        each = ", ".join(f"{what} on {_ranks(ranks)}" for what, ranks in kinds.items())
        lines.append(f"number {newest} is not the same collective on all ranks: {each}")
    return lines


def _what(entry: Mapping[str, Any]) -> str:
    sizes = [str(size) for size in entry["sizes"]]
    shown = ", ".join(sizes[:_LONGEST]) + (f" and {len(sizes) - _LONGEST} more" if len(sizes) > _LONGEST else "")
    return " ".join(part for part in (entry["name"], shown, "/".join(dict.fromkeys(entry["dtypes"]))) if part)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS])) + (f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
