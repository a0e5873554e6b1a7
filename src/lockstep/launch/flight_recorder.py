"""The last collectives of each rank, in words, for a hang report: what each rank waits for, and which ranks differ."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from lockstep.core.errors import number_of
from lockstep.core.parallel import torch_internals

_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
_ENTRIES = 2000
_SHOWN = 3
_LONGEST = 4
_DONE = "completed"


def switch_on() -> None:
    """Let torch record the last collectives of this process. Call it before the first process group is made."""
    if not any(name in os.environ for name in _BUFFER):
        os.environ[_BUFFER[0]] = str(_ENTRIES)


def of_this_rank() -> str:
    """The last collectives of this rank by group, as text for `describe`: the last few of each backend of a group."""
    by_group: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for entry in torch_internals.recorded_collectives():
        if entry["is_p2p"] and _backend(entry["profiling_name"]) == "gloo":  # of `tree`: they differ by rank
            continue
        name, description = entry["process_group"]
        key = f"{description} ({name})" if description else str(name)
        by_group.setdefault(key, {}).setdefault(_backend(entry["profiling_name"]), []).append(
            {
                "name": entry["profiling_name"],
                "number": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
                "sizes": entry["input_sizes"],
                "dtypes": entry["input_dtypes"],
                "state": _DONE if entry["retired"] else entry["state"],
            }
        )
    return json.dumps(
        {group: [entry for each in found.values() for entry in each[-_SHOWN:]] for group, found in by_group.items()}
    )


def describe(texts: Mapping[int, str]) -> str:
    """The last collectives of all ranks in words.

    Args:
        texts: of `of_this_rank`, by rank. An empty text: that rank did not answer.

    Returns:
        lines; first those that show how the ranks of a group differ. Empty if no rank made a collective.
    """
    ranks = {rank: _by_backend(json.loads(text)) for rank, text in sorted(texts.items()) if text}
    groups = list(dict.fromkeys(group for found in ranks.values() for group in found))
    lines = []
    for group in groups:
        last = {rank: found[group][-1] for rank, found in ranks.items() if group in found}
        lines += [f"  {group[0]}: {difference}" for difference in differences(last)]
    for rank, found in ranks.items():
        for (name, _), entries in found.items():
            lines.append(f"  rank {rank}, {name}: " + "; ".join(_words(entry) for entry in entries))
    silent = [rank for rank, text in texts.items() if not text]
    if lines and silent:
        lines.append(f"  no answer from {_ranks(silent)}")
    return "\n".join(["the last collectives of each rank, the newest last:", *lines]) + "\n" if lines else ""


def _by_backend(groups: Mapping[str, list[dict[str, Any]]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Collectives by group and backend. On GPUs a group has gloo and NCCL, and each counts its own collectives."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group, entries in groups.items():
        for entry in entries:
            found.setdefault((group, _backend(entry["name"])), []).append(entry)
    return found


def _backend(name: str) -> str:
    """`gloo` of `gloo:all_reduce`."""
    return name.partition(":")[0]


def differences(last: Mapping[int, dict[str, Any]]) -> list[str]:
    """Differences between the newest collectives of the ranks of a group."""
    newest = max(entry["number"] for entry in last.values())
    behind: dict[int, list[int]] = {}
    for rank, entry in last.items():
        if entry["number"] < newest:
            behind.setdefault(entry["number"], []).append(rank)
    ahead = [rank for rank, entry in last.items() if entry["number"] == newest]
    lines = [
        f"{_ranks(ranks)} made only {number_of(number, 'collective')}, and {_ranks(ahead)} made {newest}: "
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


def _words(entry: Mapping[str, Any]) -> str:
    name, _, rest = _what(entry).partition(" ")
    return f"{name} {entry['number']} {rest} {'done' if entry['state'] == _DONE else 'NOT DONE, ' + entry['state']}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
