"""The trace of a training, step by step and stage by stage, and the first difference between two traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.core.data import difference
from lockstep.core.data.difference import Leaf
from lockstep.core.errors import number_of

STAGES = {
    "setup": "the setup of the process",
    "order": "the order of the samples",
    "file": "the file of a sample",
    "bytes": "the bytes of the file",
    "decoded": "the decoded sample",
    "prepared": "the prepared sample",
    "split": "the split of the global batch",
    "batch": "the batch",
    "weights": "the weights before the step",
    "optimizer": "the state of the optimizer before the step",
    "moved": "the weights, which change within the step",
    "forward": "an operation of the forward pass",
    "loss": "the loss",
    "gradient": "the gradient of a rank",
    "exchange": "the gradient after the exchange",
    "settings": "the settings of the update",
    "update": "the update",
    "evaluated": "the batch of an evaluation",
    "outputs": "the output of the model in an evaluation",
    "results": "the results of the evaluation",
}
"""By name, in the order of a step, with words for people."""
_BY_SAMPLE = ("file", "bytes", "decoded", "prepared")


@dataclass
class StepTrace:
    """A step on a rank: by stage, what can be compared. Digests stand for tensors."""

    step: int
    """Counted from 1."""
    stages: dict[str, Any] = field(default_factory=dict)
    detailed: bool = False
    """True if it has single samples, and operations."""
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    """Of the samples by (epoch, index): files, if the data set knows them."""


@dataclass
class Trace:
    """A training on a rank."""

    setup: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Of the training data."""
    steps: list[StepTrace] = field(default_factory=list)
    entries: list[dict[str, float]] = field(default_factory=list)
    """Of the log; on rank 0."""
    error: str = ""
    """What ended it early."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two traces."""

    step: int
    """0: before the first step."""
    stage: str
    rank: int
    what: str
    """The values of both."""
    sample: str = ""
    """The sample, for stages of samples."""
    detailed: bool = True
    """False: the traces have no details of this step."""


def first_difference(one: Sequence[Trace], other: Sequence[Trace]) -> Difference | None:
    """The first difference between two trainings, each with the trace of each rank. None: nothing differs."""
    if what := _values(one[0].setup, other[0].setup):
        return Difference(0, "setup", 0, what)
    by_step = [[{step.step: step for step in trace.steps} for trace in traces] for traces in (one, other)]
    for number in sorted(by_step[0][0].keys() & by_step[1][0].keys()):
        pair = [[of_rank[number] for of_rank in ranks if number in of_rank] for ranks in by_step]
        if found := _first_of_step(number, *pair):
            return found
    return None


def _first_of_step(number: int, one: list[StepTrace], other: list[StepTrace]) -> Difference | None:
    drawn = [sorted(pair for rank in ranks for pair in rank.stages["order"]) for ranks in (one, other)]
    detailed = one[0].detailed and other[0].detailed
    if drawn[0] != drawn[1]:
        return Difference(number, "order", 0, _drawn(*drawn))
    split = [[rank.stages["split"] for rank in ranks] for ranks in (one, other)]
    if split[0] != split[1]:
        return Difference(number, "split", 0, _sizes(*split))
    for stage in STAGES:
        for rank, (mine, yours) in enumerate(zip(one, other, strict=True)):
            pair = mine.stages.get(stage), yours.stages.get(stage)
            if repr(pair[0]) == repr(pair[1]) or (stage == "file" and _are_moved(*pair)):
                continue
            if stage == "order":
                return Difference(number, stage, rank, _drawn(*pair))
            sample, what = "", _operation(*pair) if stage == "forward" else _values(*pair)
            if stage == "gradient" and (more := _operation(mine.stages.get("backward"), yours.stages.get("backward"))):
                what += f"; {more}"
            if stage in _BY_SAMPLE and pair[0] and pair[1]:
                key = next(key for key in pair[0] if repr(pair[0][key]) != repr(pair[1].get(key)))
                names = mine.stages["file"], yours.stages["file"]
                sample = f"sample {key[1]} ({names[0].get(key)})"
                what = _values(pair[0][key], pair[1].get(key))
            if what:
                return Difference(number, stage, rank, what, sample, detailed)
    return None


def _are_moved(one: Any, other: Any) -> bool:
    """True if the files of all samples have the same names in both runs, below one folder each."""
    if not one or not other:
        return False
    roots = set()
    for key in one.keys() | other.keys():
        pair = [side.get(key, "").split("/") for side in (one, other)]
        while len(pair[0]) > 1 and len(pair[1]) > 1 and pair[0][-1] == pair[1][-1]:
            pair = [parts[:-1] for parts in pair]
        roots.add(tuple(map(tuple, pair)))
    names = [[name.rpartition("/")[2] for _, name in sorted(side.items())] for side in (one, other)]
    return len(roots) == 1 and names[0] == names[1] and all("/" in name for name in one.values())


def _operation(one: Any, other: Any) -> str:
    """The first operation that differs in its name or its result. A line may have moved."""
    for number, (mine, yours) in enumerate(zip(one or (), other or (), strict=False), 1):
        if mine[:2] != yours[:2]:
            names = f"{mine.name} at {mine.place}"
            against = "" if mine.name == yours.name else f" against {yours.name} at {yours.place}"
            return f"operation {number}, {names}{against}"
    return "" if len(one or ()) == len(other or ()) else f"{len(one or ())} operations against {len(other or ())}"


def _drawn(one: Any, other: Any) -> str:
    if len(one) != len(other):
        return f"{number_of(len(one), 'sample')} against {len(other)}"
    place = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
    return f"sample {one[place][1]} against {other[place][1]}"


def _sizes(one: Any, other: Any) -> str:
    words = [
        f"{number_of(len(ranks), 'rank')} with micro-batches of {', '.join(map(str, ranks[0]))}"
        for ranks in (one, other)
    ]
    return " against ".join(words)


def _values(one: Any, other: Any) -> str:
    """How two values differ, for people. Empty: they do not."""
    if is_record(one) and is_record(other):
        same = [leaf[:3] for leaf in one] == [leaf[:3] for leaf in other]
        return "" if same else difference.first(one, other, ("A", "B"))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in {**one, **other} if _values(one.get(key), other.get(key))]
        if not keys:
            return ""
        first = _values(one.get(keys[0]), other.get(keys[0]))
        more = f", and {len(keys) - 1} more of {len(one)}" if len(keys) > 1 else f", of {len(one)}" * (len(one) > 1)
        return f"{keys[0]}: {first}{more}" if first != "differs" else f"{keys[0]}{more}"
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and not is_digest(one):
        pairs = enumerate(zip(one, other, strict=False))
        place = next((at for at, pair in pairs if _values(*pair)), None)
        if place is not None:
            return f"number {place + 1}: {_values(one[place], other[place])}"
        return f"{len(one)} against {len(other)}" if len(one) != len(other) else ""
    if repr(one) == repr(other):
        return ""
    if one is None or other is None:
        return f"only in run {'A' if other is None else 'B'}"
    if not is_digest(one) or not is_digest(other):
        return f"{one} against {other}"
    return f"{one[0]} {list(one[1])} against {other[0]} {list(other[1])}" if one[:-2] != other[:-2] else "differs"


def is_record(value: Any) -> bool:
    """True for the record of a sample or a batch."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Leaf)


def is_digest(value: Any) -> bool:
    """True for the digest of a tensor, whose values say nothing to people."""
    return isinstance(value, TensorDigest)


class Operation(NamedTuple):
    """An operation of torch."""

    name: str
    result: TensorDigest
    place: str
    """File and line."""


class TensorDigest(tuple[Any, ...]):
    """The digest of a tensor."""

    __slots__ = ()
