"""Who is at fault: pure functions of what ranks computed from the same micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.watch.gradients import Detail

Kind = Literal["data", "not deterministic", "device", "code", "link", "memory", "unclear"]
_TIMES = 16.0  # a rounding difference stays below this many times the observed rounding, or the format's


ROUNDING = 0.05
"""A loss that differs from itself by a larger fraction exceeds what kernels that add in any order explain."""


@dataclass(frozen=True)
class Verdict:
    """What is at fault, and where."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks at fault, or those between which no decision is possible."""
    text: str
    tensor: str = ""
    """The first tensor that differs."""
    guilty: tuple[int, ...] = ()
    """Ranks that must not continue."""


def named(ranks: Sequence[int], joined: str = "and") -> str:
    """Ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} {joined} {ranks[-1]}"


def blamed_on_parts(verdict: Verdict, writes: Sequence[Mapping[str, str]], parts: Sequence[str]) -> Verdict:
    """The verdict on weights that differ: code that was seen writing them comes before hardware.

    Args:
        writes: by rank, the weights that each of the user's Parts was seen writing there, and the event.
        parts: the user's Parts. They can also write unseen, through `.data`, and replays leave them out.
    """
    if verdict.kind not in ("memory", "device", "unclear") or not parts:
        return verdict
    for name in parts:
        ranks = tuple(rank for rank, of_rank in enumerate(writes) if name in of_rank)
        if ranks:
            what = f"the Part {name} has written {writes[ranks[0]][name]}, on {named(ranks)}"
            what += " and not on the others" if len(ranks) < len(writes) else ""
            seen = verdict.text.partition(": the memory or the device of ")[0]
            return Verdict("code", ranks, f"{what}: {seen}", verdict.tensor)
    doubt = f"{verdict.text}; or code of these Parts, which replays do not call: {', '.join(parts)}. Start without them"
    return Verdict("unclear", verdict.ranks, doubt, verdict.tensor)


@dataclass(frozen=True)
class RecomputeFinding:
    """Who differs after all ranks have computed the same thing twice again."""

    how: Literal["unstable", "repeats", "once", "tie", "nobody"]
    """unstable: these ranks differ from themselves. repeats: their results differ from the majority's, every time.
    once: their earlier result differed, but not again. tie: no result has a majority."""
    ranks: tuple[int, ...]
    reference: Detail | None = None
    """The result of most ranks."""


Same = Callable[[Detail, Detail], bool]


def who(pairs: Sequence[tuple[int, Detail]], repeats: Sequence[tuple[Detail, Detail]], same: Same) -> RecomputeFinding:
    """Find the ranks that differ.

    Args:
        pairs: ranks, and their first results.
        repeats: by rank, its results of two repetitions.
        same: whether two results are the same.
    """
    world = len(repeats)
    unstable = [rank for rank, (first, second) in enumerate(repeats) if not same(first, second)]
    groups: list[list[int]] = []
    for rank in range(world):
        if rank not in unstable:
            group = next((one for one in groups if same(repeats[one[0]][0], repeats[rank][0])), None)
            if group is None:
                groups.append([rank])
            else:
                group.append(rank)
    most = max(groups, key=len, default=[])
    if 2 * len(most) <= world:
        return (
            RecomputeFinding("unstable", tuple(unstable)) if unstable else RecomputeFinding("tie", tuple(range(world)))
        )
    reference = repeats[most[0]][0]
    others = tuple(rank for rank in range(world) if rank not in most)
    if others:
        return RecomputeFinding("unstable" if set(others) <= set(unstable) else "repeats", others, reference)
    guilty = tuple(dict.fromkeys(rank for rank, found in pairs if not same(found, reference)))
    return RecomputeFinding("once" if guilty else "nobody", guilty, reference)


def same_bits(one: Detail, other: Detail) -> bool:
    """Whether losses and gradients are bitwise equal."""
    return one.folded == other.folded


def same_batch(one: Detail, other: Detail) -> bool:
    """Whether the inputs are bitwise equal."""
    return one.batch == other.batch


def first_difference(one: Detail, other: Detail) -> str:
    """The name of the first loss or gradient that differs; empty if none does."""
    for head in one.losses:
        if one.losses[head] != other.losses.get(head):
            return f"the loss {head}" if head != "loss" else "the loss"
    names = [name for name in one.gradients if one.gradients[name] != other.gradients.get(name)]
    # A backward pass begins at the end of the model: what was computed first is what differs first.
    return f"the gradient of {names[0]}" if names else ""


@dataclass
class Noise:
    """How much a rank's results differ when repeated, if kernels are not deterministic.

    A random-sign sum of a difference d is about |d|_2 in size. So a rank may differ from another by `_TIMES` the
    largest such sum of any rank against itself, or `_TIMES` the rounding of the number format.
    """

    relative: dict[str, float] = field(default_factory=dict)
    """By name of the parameter, and by head of the loss: the largest difference of a rank from itself, relative to the
    norm."""

    def add(self, one: Detail, other: Detail) -> None:
        """Two results of one rank for the same inputs."""
        for name, difference in _differences(one, other).items():
            self.relative[name] = max(self.relative.get(name, 0.0), difference)

    @property
    def of_loss(self) -> float:
        """The largest relative difference of a loss from itself."""
        return max((of for name, of in self.relative.items() if name.startswith("the loss")), default=0.0)

    def same(self, one: Detail, other: Detail) -> bool:
        """Whether two results differ by no more than rounding explains."""
        return not self.beyond(one, other)

    def beyond(self, one: Detail, other: Detail) -> str:
        """The first tensor that differs by more than rounding explains; empty if none does."""
        eps = max([*one.eps.values(), 2.0**-23 if one.eps else 2.0**-52])
        for name, difference in _differences(one, other).items():
            if not difference <= _TIMES * (self.relative.get(name, 0.0) + eps):  # also true of NaN
                return name
        return ""


def _differences(one: Detail, other: Detail) -> dict[str, float]:
    """The differences of two results, relative to the larger norm, by head of the loss and by name of the parameter.

    Numbers that are not finite in both do not differ: the model diverges, and no device is at fault.
    """
    found = {}
    for head in one.losses.keys() | other.losses.keys():
        a, b = one.losses.get(head, float("inf")), other.losses.get(head, float("-inf"))
        found[f"the loss {head}"] = 0.0 if a == b or (a != a and b != b) else abs(a - b) / max(abs(a), abs(b))
    for name in one.sums.keys() | other.sums.keys():
        found[f"the gradient of {name}"] = _relative(one.sums, other.sums, name)
    return found


def _relative(one: Mapping[str, list[float]], other: Mapping[str, list[float]], name: str) -> float:
    if name not in one or name not in other:
        return float("inf")
    (*a, square), (*b, other_square) = one[name], other[name]
    if not math.isfinite(square) and not math.isfinite(other_square):
        return 0.0
    largest = max(abs(x - y) for x, y in zip(a, b, strict=True))
    norm = max(square, other_square) ** 0.5
    return 0.0 if largest == 0 else largest / norm if norm else float("inf")
