"""Labels of samples: class numbers from the values of a table, the same numbers for several sources, and splits by
class."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lockstep.core.data.order import permute
from lockstep.core.errors import DataError, number_of
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.readers.class_table import listed

_ITEM = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NUMPY = re.compile(rf"\[\s*(?:{_ITEM.pattern})(?:\s+(?:{_ITEM.pattern}))*\s*\]")


class Labelled(Protocol):
    """Samples with labels."""

    names: list[str]
    """The names of the labels."""
    codes: Array
    """The label of each sample as its index in `names`, or -1: (samples,). With several labels: 0 and 1, (samples,
    names)."""

    def __len__(self) -> int: ...

    def where(self, row: int) -> str:
        """The place of a sample, for messages."""
        ...


def single_labels(
    values: Sequence[Any],
    classes: Sequence[str] | None,
    *,
    column: str,
    where: Callable[[int], str],
    for_lists: str = "set task.multi_label=true if texts have several labels",
) -> tuple[list[str], Array]:
    """Names and codes of samples with a single label each.

    Args:
        classes: the names of the classes if `values` are class numbers. None: `values` are the labels themselves.
        column: the name of the column, for errors. where: returns the place of a value from its index, for errors.
        for_lists: the remedy if a label is a list.

    Raises:
        DataError: a sample has no label, or a list of labels.
    """
    for number, value in enumerate(values):
        is_text = isinstance(value, str) and value.lstrip().startswith("[")
        if isinstance(value, list | Mapping) or (is_text and written_list(value) is not None):
            kind = "list as text" if isinstance(value, str) else type(value).__name__
            raise DataError(f"the label is a {kind}: {value!r}", where=where(number), remedy=for_lists)
    blank = [number for number, value in enumerate(values) if _is_blank(value, classes)]
    if blank:
        more = f"; {len(blank):,} of {len(values):,} rows have none" if len(blank) > 1 else ""
        remedy = "fill in the label, or remove the row"
        if values[blank[0]] is None:
            remedy += "; if it is a text such as NA or None, and a class, set task.missing=[]"
        what = f"no label in column {column!r}: {values[blank[0]]!r}{more}"
        raise DataError(what, where=where(blank[0]), remedy=remedy)
    if classes is not None:
        return list(classes), np.array(values, dtype=np.int64)
    written = [_name(value) for value in values]
    names = sorted_names(set(written))
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place[name] for name in written], dtype=np.int64)


def _is_blank(value: Any, classes: Sequence[str] | None) -> bool:
    blank = value is None or value != value or (isinstance(value, str) and not value.strip())
    return bool(blank or (classes is not None and not 0 <= int(value) < len(classes)))


def written_list(text: str) -> list[Any] | None:
    """The items of a list that was written as text, by Python, pandas (`['a', 'b']`), NumPy (`['a' 'b']`) or as JSON.
    None: the text is not a list."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return None
    if _NUMPY.fullmatch(text):  # Python would join texts without a comma
        return [ast.literal_eval(item) for item in _ITEM.findall(text)]
    found: Any = None
    for load in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            found = load(text)
            break
    if isinstance(found, set):
        return sorted(found, key=str)
    return list(found) if isinstance(found, list | tuple) else None


def multiple_labels(
    values: Sequence[Any], classes: Sequence[str] | None, *, separator: str, where: Callable[[int], str]
) -> tuple[list[str], Array]:
    """Names and codes of samples with any number of labels: lists, also written as text (see `written_list`), or text
    with `separator` between labels.

    The other arguments are those of `single_labels`.

    Raises:
        DataError: a value is something else, or a label is missing.
    """
    lists = []
    for number, value in enumerate(values):
        items = [] if value is None else value
        if isinstance(value, str):
            items = written_list(value)
            if items is None:
                items = [part.strip() for part in _bare(value).split(separator)]
        if not isinstance(items, list):
            remedy = f"use a list, or text with {separator!r} between labels"
            raise DataError(f"the labels are {value!r}", where=where(number), remedy=remedy)
        bad = [
            item
            for item in items
            if item is None
            or item != item
            or (classes is not None and isinstance(item, int) and not 0 <= item < len(classes))
        ]
        if bad:
            remedy = "remove it from the list, or name the label"
            raise DataError(f"{bad[0]!r} among the labels {items!r}", where=where(number), remedy=remedy)
        numbered = classes if classes is not None else ()
        written = [item for item in items if item != ""]
        lists.append([numbered[item] if numbered and isinstance(item, int) else _name(item) for item in written])
    names = list(classes) if classes is not None else sorted_names({item for items in lists for item in items})
    place = {name: number for number, name in enumerate(names)}
    codes = np.zeros((len(lists), len(names)), dtype=np.int8)
    for number, items in enumerate(lists):
        codes[number, [place[item] for item in items]] = 1
    return names, codes


def _bare(text: str) -> str:
    """The text inside the brackets of `[a, b]`."""
    text = text.strip()
    return text[1:-1] if text[:1] + text[-1:] == "[]" else text


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def sorted_names(names: Iterable[str]) -> list[str]:
    """Names sorted by value if all are numbers, otherwise alphabetically: the same order in every process and on every
    machine."""
    names = sorted(names)
    try:
        values = {name: float(name) for name in names}
    except ValueError:
        return names
    return sorted(names, key=values.__getitem__) if all(map(math.isfinite, values.values())) else names


def match_labels(samples: Labelled, names: Sequence[str]) -> Array:
    """The labels of `samples`, which have their own names, as indices into `names`.

    Raises:
        DataError: `names` lacks some of the labels. The error names a label, and the first text that has it.
    """
    unknown = [name for name in samples.names if name not in names]
    used = np.unique(samples.codes) if samples.codes.ndim == 1 else np.flatnonzero(samples.codes.any(axis=0))
    unknown = [name for name in unknown if samples.names.index(name) in used]
    if unknown:
        code = samples.names.index(unknown[0])
        row = int(np.flatnonzero(samples.codes == code if samples.codes.ndim == 1 else samples.codes[:, code])[0])
        more = f", and {number_of(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        what = f"label {unknown[0]!r} does not occur in the training data{more}"
        remedy = f"the {len(names)} labels are: {listed(names)}; remove these rows, or train with them"
        raise DataError(what, where=samples.where(row), remedy=remedy)
    if samples.codes.ndim == 1:
        places = np.array([*(names.index(name) if name in names else -1 for name in samples.names), -1], dtype=np.int64)
        return places[samples.codes]
    codes = np.zeros((len(samples), len(names)), dtype=np.int8)
    for number, name in enumerate(samples.names):
        if name in names:
            codes[:, names.index(name)] = samples.codes[:, number]
    return codes


def check_groups_apart(training: Array | None, evaluation: Array | None, *, where: str) -> None:
    """Check that no group is in both splits.

    Args:
        training, evaluation: the name of each sample's group. None: there are no groups.

    Raises:
        DataError: groups are in both. The error names some.
    """
    if training is None or evaluation is None:
        return
    both = np.intersect1d(training, evaluation).tolist()
    if both:
        what = f"{len(both)} groups are in both the training and the evaluation data: {listed(both)}"
        remedy = "move the rows of each group to one side, or give data.train alone, which is split by group"
        raise DataError(what, where=where, remedy=remedy)


def groups_of(values: Sequence[Any], *, column: str, where: Callable[[int], str]) -> Array:
    """The group of each sample, as text.

    Raises:
        DataError: a sample has no group.
    """
    names = ["" if value is None or value != value else _name(value) for value in values]
    if "" in names:
        what = f"no group in column {column!r}; {names.count(''):,} of {len(names):,} rows have none"
        raise DataError(what, where=where(names.index("")), remedy="fill in the group, or remove the row")
    return np.array(names)


def split_groups(labels: Array, groups: Array, fraction: float, seed: int) -> tuple[Array, Array]:
    """As `split`, with all samples of a group on one side.

    Groups are drawn by a permutation of `seed`, large ones first. One is held back if that brings the numbers of all
    classes closer to their fractions, and some samples of each of its classes remain for training.
    """
    classes = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    names, group = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), classes.max(initial=0) + 1), dtype=np.int64)
    np.add.at(counts, (group, classes), 1)
    left, wanted = counts.sum(axis=0), counts.sum(axis=0) * fraction
    drawn = np.argsort(permute(np.arange(len(names)), len(names), seed))
    held = np.zeros(len(names), dtype=bool)
    for number in drawn[np.argsort(-counts.sum(axis=1)[drawn], kind="stable")]:
        own = counts[number]
        closer = np.abs(wanted - own).sum() < np.abs(wanted).sum()
        if closer and (left > own)[own > 0].all():
            held[number] = True
            left, wanted = left - own, wanted - own
    return np.flatnonzero(~held[group]), np.flatnonzero(held[group])


def split(labels: Array, fraction: float, seed: int) -> tuple[Array, Array]:
    """Sorted rows for training, and sorted rows for evaluation: `fraction` of every class, drawn by a permutation of
    `seed`.

    Each class contributes its fraction, rounded up or down so that the sum is the fraction of all samples, as far as
    possible. A class with a single sample stays in training. With several labels per text, a class is a combination of
    labels.
    """
    classes = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(classes)
    shares = sizes * fraction
    counts = np.floor(shares).astype(np.int64)
    wanted = round(len(labels) * fraction) - int(counts.sum())
    by_rest = np.argsort(-(shares - counts), kind="stable")
    may_grow = [number for number in by_rest if counts[number] < shares[number] and counts[number] + 1 < sizes[number]]
    for number in may_grow[: max(0, wanted)]:
        counts[number] += 1
    order = permute(np.arange(len(labels)), len(labels), seed)
    held = np.zeros(len(labels), dtype=bool)
    for number, count in enumerate(counts):
        members = np.flatnonzero(classes == number)
        held[members[np.argsort(order[members])[:count]]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def count_labels(names: Sequence[str], labels: Array) -> dict[str, int]:
    """The number of samples of each class."""
    counts: Sequence[int]
    if labels.ndim == 1:
        counter = Counter(labels.tolist())
        counts = [counter[number] for number in range(len(names))]
    else:
        counts = labels.sum(axis=0, dtype=np.int64).tolist()
    return dict(zip(names, counts, strict=True))
