"""Labels of samples: from what a table holds to class numbers, from one source's names to another's, and parts of every class."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.data.order import permute
from lockstep.errors import DataError

Array = npt.NDArray[Any]
_SHOWN = 8


class Labelled(Protocol):
    """Samples with labels. codes: places in `names`, -1 where there is none; with several labels per sample, 0 and 1 of shape (samples, names)."""

    names: list[str]
    codes: Array

    def __len__(self) -> int: ...

    def where(self, row: int) -> str:
        """A sample in messages."""
        ...


def one_each(
    values: Sequence[Any], classes: Sequence[str] | None, column: str, where: Callable[[int], str]
) -> tuple[list[str], Array]:
    """Names and codes of samples with one label each.

    Args:
        classes: what numbers in `values` stand for; None: `values` are the labels themselves.
        column, where: for errors.

    Raises:
        DataError: a sample without label, or with a list of them.
    """
    for number, value in enumerate(values):
        if isinstance(value, list | Mapping):
            remedy = "set task.multi_label=true where a text has several labels"
            raise DataError(f"the label is a {type(value).__name__}: {value!r}", where=where(number), remedy=remedy)
        if (
            value is None
            or value != value
            or (isinstance(value, str) and not value.strip())
            or (classes is not None and not 0 <= int(value) < len(classes))
        ):
            raise DataError(
                f"no label in column {column!r}: {value!r}",
                where=where(number),
                remedy="fill in the label, or remove the row",
            )
    if classes is not None:
        return list(classes), np.array(values, dtype=np.int64)
    written = [_name(value) for value in values]
    names = sorted_names(set(written))
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place[name] for name in written], dtype=np.int64)


def several_each(
    values: Sequence[Any], classes: Sequence[str] | None, separator: str, where: Callable[[int], str]
) -> tuple[list[str], Array]:
    """The same for samples with any number of labels: lists, or text with `separator` between labels.

    Raises:
        DataError: something else, or a label that is none.
    """
    lists = []
    for number, value in enumerate(values):
        items = (
            [part.strip() for part in value.split(separator)]
            if isinstance(value, str)
            else ([] if value is None else value)
        )
        if not isinstance(items, list):
            raise DataError(
                f"the labels are {value!r}",
                where=where(number),
                remedy=f"use a list, or text with {separator!r} between labels",
            )
        bad = [
            item
            for item in items
            if item is None
            or item != item
            or (classes is not None and isinstance(item, int) and not 0 <= item < len(classes))
        ]
        if bad:
            raise DataError(
                f"{bad[0]!r} among the labels {items!r}",
                where=where(number),
                remedy="leave it out of the list, or name the label",
            )
        lists.append(
            [
                classes[item] if classes is not None and isinstance(item, int) else _name(item)
                for item in items
                if item != ""
            ]
        )
    names = list(classes) if classes is not None else sorted_names({item for items in lists for item in items})
    place = {name: number for number, name in enumerate(names)}
    codes = np.zeros((len(lists), len(names)), dtype=np.int8)
    for number, items in enumerate(lists):
        codes[number, [place[item] for item in items]] = 1
    return names, codes


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def sorted_names(names: Iterable[str]) -> list[str]:
    """Numbers by value, other names by letter: the same in every process and on every machine."""
    names = sorted(names)
    try:
        values = {name: float(name) for name in names}
    except ValueError:
        return names
    return sorted(names, key=values.__getitem__) if all(map(math.isfinite, values.values())) else names


def match_labels(found: Labelled, names: Sequence[str]) -> Array:
    """The labels of `found`, from a source of its own, as places in `names`.

    Raises:
        DataError: labels that `names` lacks; names them, and the first text with one.
    """
    unknown = [name for name in found.names if name not in names]
    used = np.unique(found.codes) if found.codes.ndim == 1 else np.flatnonzero(found.codes.any(axis=0))
    unknown = [name for name in unknown if found.names.index(name) in used]
    if unknown:
        code = found.names.index(unknown[0])
        row = int(np.flatnonzero(found.codes == code if found.codes.ndim == 1 else found.codes[:, code])[0])
        more = f", and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        what = f"label {unknown[0]!r} does not occur in the training data{more}"
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise DataError(
            what,
            where=found.where(row),
            remedy=f"the {len(names)} labels are: {listed}; remove these rows, or train with them",
        )
    if found.codes.ndim == 1:
        places = np.array([*(names.index(name) if name in names else -1 for name in found.names), -1], dtype=np.int64)
        return places[found.codes]
    codes = np.zeros((len(found), len(names)), dtype=np.int8)
    for number, name in enumerate(found.names):
        if name in names:
            codes[:, names.index(name)] = found.codes[:, number]
    return codes


def split(labels: Array, fraction: float, seed: int) -> tuple[Array, Array]:
    """Rows for training and for evaluation, each sorted: `fraction` of every class is held back, drawn by a permutation that `seed` keys.

    Each class gives a number that is next to its share, so that the sum is the share of all, as far as classes of one text allow;
    with several labels per text, a class is a combination of labels. One of a class of its own stays in training.
    """
    classes = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(classes)
    shares = sizes * fraction
    counts = np.floor(shares).astype(np.int64)
    wanted = round(len(labels) * fraction) - int(counts.sum())
    by_rest = np.argsort(-(shares - counts), kind="stable")
    for number in [one for one in by_rest if counts[one] < shares[one] and counts[one] + 1 < sizes[one]][
        : max(0, wanted)
    ]:
        counts[number] += 1
    order = permute(np.arange(len(labels)), len(labels), seed)
    held = np.zeros(len(labels), dtype=bool)
    for number, count in enumerate(counts):
        mine = np.flatnonzero(classes == number)
        held[mine[np.argsort(order[mine])[:count]]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def count_labels(names: Sequence[str], labels: Array) -> dict[str, int]:
    """How many samples each class has."""
    counts: Sequence[int]
    if labels.ndim == 1:
        found = Counter(labels.tolist())
        counts = [found[number] for number in range(len(names))]
    else:
        counts = labels.sum(axis=0, dtype=np.int64).tolist()
    return dict(zip(names, counts, strict=True))
