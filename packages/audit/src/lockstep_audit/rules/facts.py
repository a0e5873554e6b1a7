"""Queries that several rules make: which ranks train together, and which events of two ranks correspond."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, Rule, SourceLine

Key = tuple[str, int, int]
"""An object of the script: the file and line that made it, and its number among those that this line made."""
RULES: list[Rule] = []
"""All rules whose modules are imported."""
_REPLICAS = ("ddp", "fsdp1", "fsdp2")
_NOWHERE = ("?", 0, "")

Check = Callable[[EventHistory], Iterable[Finding] | str]


def rule(id: str, name: str, title: str, severity: Literal["error", "warning"] = "error") -> Callable[[Check], Check]:
    """Make a function the check of a rule. Each line is reported once, with the ranks of all its findings."""

    def add(check: Check) -> Check:
        def each_line_once(history: EventHistory) -> Iterable[Finding] | str:
            found = check(history)
            return found if isinstance(found, str) else _each_line_once(found)

        RULES.append(Rule(id, name, title, severity, each_line_once))
        return check

    return add


def _each_line_once(findings: Iterable[Finding]) -> list[Finding]:
    lines: dict[object, Finding] = {}
    for finding in findings:
        key = (finding.where.file, finding.where.line) if finding.where else len(lines)
        earlier = lines.setdefault(key, finding)
        lines[key] = dataclasses.replace(earlier, ranks=tuple(sorted({*earlier.ranks, *finding.ranks})))
    return list(lines.values())


def place(at: Sequence[Any] | None) -> SourceLine | None:
    """The place of an event's `at` or `made_at`."""
    return SourceLine(*at) if at else None


def line(at: Sequence[Any] | None) -> str:
    """`train.py:31`, for sentences."""
    return f"{os.path.basename(at[0])}:{at[1]}" if at else "an unknown line"


def named(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 1`."""
    ranks = sorted(ranks)
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"


def number_of(number: Any, noun: str, verb: str = "", verb_of_many: str = "") -> str:
    """A number and what it counts, in singular or plural: `1 step`, or with verbs `1 buffer differs`."""
    plural = f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return f"1 {noun} {verb}".rstrip() if number == 1 else f"{number} {plural} {verb_of_many}".rstrip()


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def each_rank(values: Mapping[int, object]) -> str:
    """`12 on rank 0, 11 on ranks 1, 2`."""
    by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        by_value[str(value)].append(rank)
    return ", ".join(f"{value} on {named(ranks)}" for value, ranks in by_value.items())


def differ(values: Mapping[int, object]) -> bool:
    """True if two ranks have different values. NaN equals NaN."""
    first = next(iter(values.values()), None)
    return any(value != first and repr(value) != repr(first) for value in values.values())


def group_of(history: EventHistory, wrap: Event) -> tuple[int, ...]:
    """The ranks that average gradients with the rank of this `wrap` event, itself included."""
    if "ranks" in wrap:
        return tuple(sorted(wrap["ranks"]))
    for made in history.of("group", rank=wrap["rank"]):
        if "group" in wrap and made.get("name") == wrap["group"] and wrap["rank"] in made["ranks"]:
            return tuple(sorted(made["ranks"]))
    return tuple(history.ranks)


def replicas(history: EventHistory, *hows: str) -> list[tuple[int, ...]]:
    """Groups of ranks that train one model together, on different data.

    Args:
        hows: only groups of these wrappers. Without: of any wrapper, and of scripts that average gradients themselves.
    """
    wraps = [wrap for wrap in history.of("wrap") if wrap["how"] in (hows or _REPLICAS)]
    groups = {group_of(history, wrap) for wrap in wraps}
    if not wraps and not hows and any(history.of("hand_reduce")):
        groups = {tuple(history.ranks)}
    return sorted(group for group in groups if len(group) > 1)


def keys(history: EventHistory, kind: str, what: str, made: str = "made_at") -> dict[tuple[int, int], Key]:
    """The object that an id refers to, by rank and id. Objects of two ranks with the same key correspond."""
    found: dict[tuple[int, int], Key] = {}
    numbers: dict[tuple[int, str, int], int] = defaultdict(int)
    for event in history.of(kind):
        rank, number = event["rank"], event.get(what)
        if number is None or (rank, number) in found:
            continue
        file, row, _ = event.get(made) or event.get("at") or _NOWHERE
        found[rank, number] = (file, row, numbers[rank, file, row])
        numbers[rank, file, row] += 1
    return found


def numbered(events: Iterable[Event]) -> Iterator[tuple[Key, Event]]:
    """Events of one rank, each with its line and its number among those of this line."""
    numbers: dict[tuple[str, int], int] = defaultdict(int)
    for event in events:
        file, row, _ = event.get("at") or _NOWHERE
        yield (file, row, numbers[file, row]), event
        numbers[file, row] += 1


def steps(history: EventHistory) -> dict[Key, dict[int, dict[int, Event]]]:
    """The `step` events: by optimizer, rank, and number of the optimizer's step."""
    known = keys(history, "optimizer", "optimizer")
    found: dict[Key, dict[int, dict[int, Event]]] = defaultdict(lambda: defaultdict(dict))
    for event in history.of("step"):
        key = known.get((event["rank"], event["optimizer"]))
        if key is not None:
            by_index = found[key][event["rank"]]
            skipped = by_index.get(event["index"], {})  # a step that a scaler skipped has the number of the next
            backwards = [*skipped.get("backwards", ()), *(event.get("backwards") or ())]
            by_index[event["index"]] = {**event, "backwards": backwards}
    return found


def passes(event: Event) -> list[Event]:
    """The backward passes of a step that gave gradients to the model of its optimizer."""
    backwards = list(event.get("backwards") or ())
    return [each for each in backwards if "synced" in each] or backwards


def optimizer_at(history: EventHistory, key: Key) -> Sequence[Any] | None:
    """The line that made an optimizer, or the line of its first step."""
    known = keys(history, "optimizer", "optimizer")
    for event in history.of("optimizer"):
        if known.get((event["rank"], event["optimizer"])) == key:
            return event.get("made_at") or event.get("at")
    return None


def uses(history: EventHistory, framework: str) -> bool:
    """True if the script has imported this framework."""
    return any(event["name"] == framework for event in history.of("framework"))
