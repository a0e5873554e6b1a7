"""A table that shows people whether replicas agree: weights and gradients of some parameters, and digests by rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.errors import number_of
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.part import Training
from lockstep.parts.digest import Digest
from lockstep.parts.replicas import differing, digests_of

_SHOWN, _RANKS_SHOWN = 4, 8  # the first and the last parameters; digests by rank
_COLUMNS = "[:, "  # follows the name, if this rank holds only some columns: see `digests_of`


class Held(NamedTuple):
    """What a rank holds of a parameter."""

    start: int
    rows: int
    digest: Digest
    figures: Sequence[float] = ()
    """Of these rows: the sum of squares, the sum, and the gradient's sum of squares. Empty: the table leaves it out."""


class Probe(BuiltInPart):
    """A table after the last step of every few epochs.

    Args:
        every: epochs between two tables.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.gradients: dict[str, Tensor] = {}

    def before_update(self, training: Training) -> None:
        if self._is_due(training):
            self.gradients = {name: _squares(gradient) for name, gradient in training.gradients().items()}

    def after_step(self, training: Training) -> None:
        if not self._is_due(training):
            return
        assert isinstance(training, Inside)
        with training.window.excluded():
            by_rank = training.gather(self._held(dict(training.model.named_parameters())))
        self.gradients = {}
        for line in lines(by_rank, training.is_sharded, f"probe after epoch {training.epoch:g}"):
            training.tell(line)

    def _is_due(self, training: Training) -> bool:
        return training.step % (self.every * training.steps_per_epoch) == 0

    def _held(self, parameters: Mapping[str, Any]) -> dict[str, Held]:
        names = list(parameters)
        shown = names if len(names) <= 2 * _SHOWN else names[:_SHOWN] + names[-_SHOWN:]
        of_shown = []
        for name in shown:
            rows = local(parameters[name].detach()).float()
            of_shown += [_squares(rows), rows.sum(), self.gradients.get(name, rows.new_tensor(-1.0))]
        values = torch.stack(of_shown).tolist()
        figures = {name: tuple(values[3 * place : 3 * place + 3]) for place, name in enumerate(shown)}
        return {
            name: Held(*one, figures.get(name.partition(_COLUMNS)[0], ()))
            for name, one in digests_of(parameters).items()
        }


def lines(by_rank: Sequence[Mapping[str, Held]], is_sharded: bool, title: str) -> list[str]:
    """Whether ranks that hold the same rows have the same bits, and the table."""
    count, ranks = number_of(len(by_rank[0]), "parameter tensor"), number_of(len(by_rank), "rank")
    found = differing([{name: one[:3] for name, one in held.items()} for held in by_rank])
    head = f"{title}: {count} on {ranks}"
    if found:
        head = f"warning: {title}: {found[0].who} in {found[0].name}; {len(found)} of {count} differ"
    elif is_sharded:
        head = f"{title}: {count}, sharded over {ranks}: the same bits wherever ranks hold the same rows"
    elif len(by_rank) > 1:
        head = f"{title}: {count}: the same bits on {ranks}"
    table = [("parameter", "norm", "sum", "gradient norm", "digest by rank"), *_rows(by_rank)]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    return [
        head,
        *("  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:4], widths[1:]), row[4]]) for row in table),
    ]


def _rows(by_rank: Sequence[Mapping[str, Held]]) -> Iterator[tuple[str, ...]]:
    """The figures of each parameter of the table, over the rows of all ranks."""
    figures: dict[str, dict[tuple[str, int, int], Sequence[float]]] = {}
    digests: dict[str, list[str]] = {}
    for held in by_rank:
        for name, one in held.items():
            if one.figures:
                parameter = name.partition(_COLUMNS)[0]
                figures.setdefault(parameter, {})[name, one.start, one.rows] = one.figures
                digests.setdefault(parameter, []).append(f"{zlib.crc32(repr(one.digest).encode()):08x}")
    for parameter, pieces in figures.items():
        squares, total, gradient = map(sum, zip(*pieces.values(), strict=True))
        shown = [*digests[parameter][:_RANKS_SHOWN], *["..."] * (len(by_rank) > _RANKS_SHOWN)]
        same = len(set(digests[parameter])) == 1 < len(by_rank)
        yield (
            parameter,
            f"{math.sqrt(squares):.6g}",
            f"{total:.6g}",
            "none" if gradient < 0 else f"{math.sqrt(gradient):.6g}",
            f"{shown[0]} on all ranks" if same else " ".join(shown),
        )


def _squares(tensor: Tensor) -> Tensor:
    return tensor.float().square().sum()
