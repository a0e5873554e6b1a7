"""Batches that only one rank skipped: for ranks that wait for each other after unequal numbers of backward passes."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import SourceLine
from lockstep_audit.rules.facts import differ, line, named, place
from lockstep_audit.rules.loaders import iterations
from lockstep_audit.rules.sources import holds, nodes

REMEDY = "decide together: all_reduce the flag (MAX), and skip the batch on all ranks or on none"
_TESTS = ("nan", "finite", "isinf", "numel", "len", "shape", "size", "None")
"""What an `if` tests when it skips a batch because of its contents."""


def skipped(history: EventHistory, ranks: Iterable[int]) -> tuple[SourceLine | None, str] | None:
    """Where a rank skipped a batch that another trained on, and what is known about it. None: no rank did so alone."""
    gaps = {rank: list(_gaps(history, rank)) for rank in ranks}
    if len(gaps) < 2 or not all(gaps.values()) or not _are_alike(history, gaps):
        return None
    for turn in zip(*gaps.values(), strict=False):
        by_rank = dict(zip(gaps, turn, strict=True))
        sums = {rank: left for rank, (left, _) in by_rank.items()}
        if differ(sums):
            rank = max(sums, key=lambda rank: sums[rank])
            return _told(history, rank, by_rank[rank][1])
    most = {rank: each[-1][0] for rank, each in gaps.items()}
    rank = max(most, key=lambda rank: most[rank])
    return _told(history, rank, gaps[rank][-1][1]) if differ(most) else None


def _gaps(history: EventHistory, rank: int) -> Iterable[tuple[int, Event]]:
    """How many batches of one rank had no backward pass, after each step and at the end of the last loop."""
    left = 0
    for event in history.of("step", rank=rank):
        left += len(event.get("micro_batches") or ()) - len(event.get("backwards") or ())
        yield left, event
    ends = [event for event in history.of("loader_end", rank=rank) if event.get("backwards")]
    last = max((event["number"] for event in history.of("step", rank=rank)), default=0)
    if ends and ends[-1].get("is_complete") and last <= ends[-1]["number"]:
        yield sum(event["batches"] - event["backwards"] for event in ends), ends[-1]


def _are_alike(history: EventHistory, ranks: Iterable[int]) -> bool:
    """True if these ranks ran the same loops. If not, data ended, a rank left a loop, or it drew an extra batch."""
    wanted, known = {*ranks}, iterations(history)
    for epochs in known.values():
        turns = {rank: sum(rank in by_rank for by_rank in epochs.values()) for rank in wanted}
        for number, by_rank in epochs.items():
            its = {rank: it for rank, it in by_rank.items() if rank in wanted}
            done = {rank: it.end["batches"] for rank, it in its.items() if it.end and number + 1 < turns[rank]}
            if differ(done) or differ({rank: it.begin.get("batches") for rank, it in its.items()}):
                return False
        if max(turns.values()) - min(turns.values()) > min(1, *turns.values()):
            return False
    return bool(known)


def _told(history: EventHistory, rank: int, event: Event) -> tuple[SourceLine | None, str]:
    before = [each for each in history.of("loader", rank=rank) if each["number"] < event["number"]]
    given = event.get("micro_batches") or [{"batch": event.get("batches", 1) - 1, "loader": event.get("loader")}]
    loop = next((each for each in reversed(before) if each["loader"] == given[0].get("loader")), None)
    passes = [each for step in history.of("step") for each in step.get("backwards") or ()]
    first = given[0]["batch"] - bool(loop and loop.get("by_framework") and given[0]["batch"])  # drawn ahead
    last = given[-2 if len(given) > 1 else -1]["batch"]
    which = f"batch {first}" if first == last else f"one of the batches {first} to {last}"
    epoch = f" of epoch {loop['epoch']}" if loop and "epoch" in loop else ""
    told = f"{named([rank])} skipped {which}{epoch}, and not all others did: since then, each of its passes is paired "
    told += "with that of a different batch, and the last pass of a rank waits forever"
    at = (loop or {}).get("at")
    rows = [found for each in _lasts(passes) for found in left_out(at, each.get("at"), each.get("loss_at"))]
    found = min(rows, default=None)
    told += f" (the loop of {line(at)})" if found else ""
    return (SourceLine(found[1], found[2], "") if found else place(at)), told


def _lasts(passes: list[Event]) -> list[Event]:
    """One backward pass of each line."""
    return list({str((each.get("at"), each.get("loss_at"))): each for each in passes}.values())


def left_out(loop: Any, backward: Any, loss: Any = None) -> list[tuple[int, str, int]]:
    """What can skip a batch, as (order, file, line), the likely ones first: for a loop and a backward pass.

    It is an `if` or an `except` of the loop before the backward pass, or of the functions that contain the loss and the
    backward pass. Lines that test for non-finite numbers, or for empty or missing data, come first.
    """
    found: list[tuple[int, str, int]] = []
    for path, row, last in {(at[0], at[1], end) for at, end in ((loop, None), (backward, True), (loss, False)) if at}:
        scope = _scope(path, row, (ast.For, ast.While) if last is None else (ast.FunctionDef,))
        for node in ast.walk(scope) if scope else ():
            end = backward[1] if backward and backward[0] == path and holds(scope, backward[1]) else None
            if isinstance(node, ast.If) and (end is None or node.lineno <= end) and _leaves(node, scope, end):
                words = ast.unparse(node.test)
                found.append((0 if any(word in words for word in _TESTS) else 2, path, node.lineno))
            elif isinstance(node, ast.Try):
                found += [(1, path, each.lineno) for each in node.handlers if _ends(each.body) and node.lineno >= row]
    return sorted(set(found))


def _scope(path: str, row: int, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
    """The innermost loop or function around a line."""
    return max((n for n in nodes(path) if isinstance(n, kinds) and holds(n, row)), key=_first, default=None)


def _first(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _ends(body: list[ast.stmt]) -> bool:
    """True if what follows is skipped: an error is swallowed, or control passes to the next batch."""
    return not any(isinstance(each, (ast.Raise, ast.Break)) for each in body)


def _leaves(node: ast.If, scope: ast.AST | None, backward: int | None) -> bool:
    """True if an `if` skips the code after it, or the backward pass in it."""
    inner = [each for part in (node.body, node.orelse) for one in part for each in ast.walk(one)]
    ways = (ast.Return,) if isinstance(scope, ast.FunctionDef) else (ast.Continue, ast.Return)
    return any(isinstance(each, ways) for each in inner) or (backward is not None and holds(node, backward))
