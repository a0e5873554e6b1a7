"""Iterations over loaders, assembled from their events."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import SourceLine
from lockstep_audit.rules import sources
from lockstep_audit.rules.facts import Key, differ, keys, place

_STATES = ("set_state", "setstate", "set_rng_state", "set_rng_state_all")


@dataclass
class Iteration:
    """One iteration of a rank over a loader."""

    begin: Event
    end: Event | None = None
    batches: dict[int, list[Any]] = field(default_factory=dict)
    """Indices by batch number."""
    sampled: dict[int, Event] = field(default_factory=dict)
    """`batch` events by batch number."""
    used: bool = False
    """Whether a step used its batches."""

    @property
    def is_training(self) -> bool:
        """True if gradients were computed during it."""
        return bool(self.end["backwards"]) if self.end and "backwards" in self.end else self.used

    @property
    def indices(self) -> list[Any]:
        """The indices in order, up to the first batch that was not recorded."""
        found: list[Any] = []
        for number in range(len(self.batches)):
            if number not in self.batches:
                break
            found += self.batches[number]
        return found

    @property
    def shards(self) -> int:
        """The number of ranks that a sampler deals the data to; 1 if none does."""
        return int((self.begin.get("distributed") or {}).get("replicas") or 1)

    @property
    def is_complete(self) -> bool:
        """True if the loader was exhausted."""
        return bool(self.end and self.end.get("is_complete"))


Iterations = dict[Key, dict[int, dict[int, Iteration]]]


def iterations(history: EventHistory) -> Iterations:
    """All iterations: by loader, epoch (iterations of the loader before), and rank."""
    known = keys(history, "loader", "loader")
    by_id: dict[tuple[int, int, int], Iteration] = {}
    found: Iterations = defaultdict(lambda: defaultdict(dict))
    for event in history.of("loader", "indices", "batch", "loader_end"):
        rank, number, epoch = event["rank"], event["loader"], event.get("epoch", 0)
        if event["kind"] == "loader":
            by_id[rank, number, epoch] = found[known[rank, number]][epoch][rank] = Iteration(event)
            continue
        iteration = by_id.get((rank, number, epoch))
        if iteration is None:
            continue
        if event["kind"] == "indices":
            first = event.get("first", 0)
            iteration.batches |= {first + place: batch for place, batch in enumerate(event["batches"])}
        elif event["kind"] == "batch":
            iteration.sampled[event["batch"]] = event
        else:
            iteration.end = event
    _mark_used(history, by_id)
    return found


def restored(history: EventHistory, begins: Mapping[int, Event]) -> SourceLine | None:
    """Where ranks with the same samples restored one generator state from one file that all of them loaded.

    Args:
        begins: by rank, the event at which the samples begin: of a loader, or of inputs without a loader.
    """
    loaded, last = dict[int, set[str]](), dict[int, Event]()
    for event in history.of("load", "generator"):
        if event["rank"] in begins and event["number"] < begins[event["rank"]]["number"]:
            if event["kind"] == "load":
                loaded.setdefault(event["rank"], set()).add(str(event.get("path")))
            elif event["rank"] in loaded:
                last[event["rank"]] = event
    if loaded.keys() != begins.keys() or not set.intersection(*loaded.values()):
        return None
    if last.keys() == begins.keys() and not differ({rank: event["digest"] for rank, event in last.items()}):
        return place(next(iter(last.values())).get("at"))
    first = next(iter(begins.values()))
    held = {rank: begin.get("generators") for rank, begin in begins.items()}
    if first["kind"] == "loader" and (None in held.values() or differ(held)):
        return None
    files = [first.get("defined_in"), *(at[0] for at in (first.get("made_at"), first.get("at")) if at)]
    rows = [(file, row) for file in dict.fromkeys(files) if file for row in _sets_states(file)]
    return SourceLine(*rows[0], "") if rows else None


def _sets_states(path: str) -> list[int]:
    """Lines of a file that set the state of a random generator."""
    calls = [n for n in sources.nodes(path) if isinstance(n, ast.Call)]
    rows = [call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] in _STATES]
    targets = [target for n in sources.nodes(path) if isinstance(n, ast.Assign) for target in n.targets]
    return sorted([*rows, *(t.lineno for t in targets if ast.unparse(t).endswith(".bit_generator.state"))])


def _mark_used(history: EventHistory, by_id: dict[tuple[int, int, int], Iteration]) -> None:
    """Mark the iterations whose batches steps used: the last one that began before each step."""
    for step in history.of("step"):
        for micro in step.get("micro_batches") or ():
            number = micro.get("loader")
            mine = (it for (*of, _), it in by_id.items() if of == [step["rank"], number])
            begun = [iteration for iteration in mine if iteration.begin["number"] < step["number"]]
            if begun and step.get("backwards"):
                max(begun, key=lambda iteration: int(iteration.begin["number"])).used = True
