"""Ranks that wait for each other: where each was when the script hung, or when a timeout or a signal ended it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep_audit.events import Event, EventHistory, blocked_in
from lockstep_audit.findings import SourceLine
from lockstep_audit.rules.facts import differ, place

_LATE = ("timed out", "timeout", "failed to pass", "preamble")
"""Words in errors of a rank whose peers did not do what it waited for."""
_GONE = ("connection closed", "connection reset", "closed by peer", "broken pipe", "connect", *_LATE)
_MOVES = ("step", "loader", "batch", "collective", "wrap", "optimizer")
"""Events that only a running script writes. An end by a signal also writes others."""


def stuck(history: EventHistory) -> dict[int, Event]:
    """The last `stuck` event of each rank that made no progress after it."""
    found: dict[int, Event] = {}
    for event in sorted(history.events, key=lambda event: int(event["number"])):
        if event["kind"] == "stuck":
            found[event["rank"]] = event
        elif event["kind"] in _MOVES or (event["kind"] == "exit" and not _says(event, _GONE) and _went_on(event)):
            found.pop(event["rank"], None)
    return found


def waiting(history: EventHistory) -> dict[int, Event]:
    """Where each rank waits, in the form of `stuck`: for ranks that are stuck, or whose collectives timed out or broke.

    A rank that a launcher ended because of them is included. Empty: no rank waited in vain.
    """
    found, ends, exits = stuck(history), lost(history), left(history)
    died = {e["rank"]: e for e in history.of("died") if e.get("at") and e["rank"] not in exits}
    is_late = any(_says(event, _LATE) for event in ends.values())
    is_broken = any(event.get("aborted") and _is_in_collective(event) for event in died.values())
    return {**died, **ends, **found} if found or is_late or is_broken else {}


def lost(history: EventHistory) -> dict[int, Event]:
    """The ends of ranks that failed because they could not reach another, in the form of `stuck`."""
    return {rank: _as_stuck(event) for rank, event in left(history).items() if _says(event, _GONE)}


def left(history: EventHistory) -> dict[int, Event]:
    """The `exit` events of ranks."""
    return {event["rank"]: event for event in history.of("exit")}


def _as_stuck(event: Event) -> Event:
    error = event["error"]
    at, stack = error.get("at"), error.get("stack") or []
    told = {"at": at, "stacks": {"MainThread": stack}, "blocked_in": blocked_in(stack, at)}
    return {**event, **told, "collectives": event.get("last")}


def _is_in_collective(event: Event) -> bool:
    return any("/distributed" in frame[0] or frame[2] == "backward" for frame in event["stacks"]["MainThread"])


def _says(event: Event, words: Sequence[str]) -> bool:
    """True if a rank failed with an error whose message has one of these words."""
    message = str((event.get("error") or {}).get("message", "")).lower()
    return any(word in message for word in words)


def _went_on(event: Event) -> bool:
    """True if a rank ended by itself, or by an error in its own code."""
    return event.get("error", {}).get("type") not in (None, "KeyboardInterrupt") or not event.get("code")


def waits_at(event: Event) -> SourceLine | None:
    """The line of the script at which the main thread waits."""
    if event.get("at"):
        return place(event["at"])
    stacks: Mapping[str, Sequence[Any]] = event.get("stacks") or {}
    frames = next((each for name, each in stacks.items() if "main" in name.lower()), next(iter(stacks.values()), []))
    return place(frames[-1]) if frames else None


def in_other_places(stuck: Mapping[int, Event]) -> bool:
    """True if ranks wait at different lines, or in different calls of one line."""
    lines = {rank: (waits_at(event) or ("?", 0))[:2] for rank, event in stuck.items()}
    is_alike = len({event["kind"] for event in stuck.values()}) == 1  # each kind names calls differently
    return differ(lines) or (is_alike and differ({rank: event.get("blocked_in") for rank, event in stuck.items()}))


def is_alone(history: EventHistory, event: Event, other: int) -> bool:
    """True if another rank was never in the function in which this rank waits, or never made this call."""
    at = waits_at(event)
    came = {tuple(each["at"]) for each in history.of(*_ALL, rank=other) if each.get("at")}
    came |= {tuple(b["at"]) for s in history.of("step", rank=other) for b in s.get("backwards") or () if b.get("at")}
    if at is None or at.function == "<module>" or not came:
        return False
    is_call = "distributed_c10d" in str(event.get("blocked_in")) and at[:2] not in {each[:2] for each in came}
    return is_call or (at.file, at.function) not in {(each[0], each[2]) for each in came}


_ALL = (*_MOVES, "loader_end", "buffers", "save", "load", "state", "scheduler", "set_epoch", "group", "bypass")


def odd(history: EventHistory, lines: Mapping[int, SourceLine | None], ahead: Iterable[int] = ()) -> int:
    """The rank whose line the fewest other ranks ever reached; of several, one that is ahead, or the first."""
    came: dict[int, set[tuple[str, int]]] = {rank: set() for rank in history.ranks}
    for event in history.events:
        passes = event.get("backwards") if event["kind"] == "step" else ()  # of loader_end: a number
        for each in (event, *(passes or ())):
            if each.get("at"):
                came[event["rank"]].add(tuple(each["at"][:2]))

    def visitors(rank: int) -> int:
        at = lines[rank]
        return sum(at is None or at[:2] in came[other] for other in came if other != rank)

    return min(lines, key=lambda rank: (visitors(rank), rank not in set(ahead)))


def ways(waiting: Mapping[int, Event]) -> dict[int, SourceLine]:
    """The current lines of ranks in the innermost function that all of them are in. Empty: there is none."""
    known = {rank: (event.get("stacks") or {}).get("MainThread") or () for rank, event in waiting.items()}
    stacks = {rank: list(reversed(frames)) for rank, frames in known.items()}
    for frames in zip(*stacks.values(), strict=False):
        if differ(dict(enumerate(frames))):
            is_same = not differ({number: (frame[0], frame[2]) for number, frame in enumerate(frames)})
            is_own = any(event.get("at") and event["at"][0] == frames[0][0] for event in waiting.values())
            lines = dict(zip(stacks, (SourceLine(*frame) for frame in frames), strict=True))
            return lines if is_same and is_own else {}
    return {}


def ahead(waiting: Mapping[int, Event]) -> set[int]:
    """The ranks that have made the most collectives."""
    if not all(event.get("collectives") for event in waiting.values()):
        return set()
    calls = {rank: event.get("collectives") or () for rank, event in waiting.items()}
    made = {rank: max((call.get("sequence") or 0 for call in each), default=0) for rank, each in calls.items()}
    return {rank for rank, number in made.items() if number == max(made.values())}


def differences(waiting: Mapping[int, Event]) -> str | None:
    """What the flight recorder shows about how the ranks differ, in words."""
    from lockstep_audit.rules import recorded

    last: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, event in waiting.items():
        for entry in event.get("collectives") or ():
            if entry.get("sequence") is not None:
                known = {"number": entry["sequence"], "name": str(entry.get("name")), "state": entry.get("state")}
                known |= {"sizes": entry.get("sizes") or [], "dtypes": entry.get("dtypes") or []}
                last[str(entry.get("group"))][rank] = known
    words = [each for by_rank in last.values() if len(by_rank) > 1 for each in recorded.differences(by_rank)]
    return words[0] if words else None
