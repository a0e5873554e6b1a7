"""Columns of a table by their role: named by the user, or found by a usual name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.errors import DataError, did_you_mean

LABEL = ("label", "labels", "category", "class", "target", "intent", "topic", "sentiment")
"""Usual names of columns that contain labels."""
GROUP = ("patient", "subject", "case", "slide", "video", "clip", "session", "user", "author", "conversation")
"""Usual names of columns whose values belong on one side of the split, without `_id`."""
_SHOWN = 40  # characters of a column's name


def named(wanted: str | int, names: Sequence[str], role: str, where: str) -> str:
    """The name of a column that is given by name, or by index from 0.

    Args:
        names: all columns.
        role: the key in `task.columns`, for the error message.
        where: the table, for the error message.

    Raises:
        DataError: there is no such column. The error lists all columns.
    """
    if str(wanted) in names:
        return str(wanted)
    if isinstance(wanted, int) and 0 <= wanted < len(names):
        return names[wanted]
    hint = did_you_mean(wanted, names)
    raise DataError(f"there is no column {wanted!r}", where=where, remedy=f"{hint}{_remedy(role, names)}")


def usual(
    usual: Sequence[str], left: Sequence[str], *, role: str, where: str, names: Sequence[str], needed: bool
) -> str | None:
    """The column among `left` with a usual name, ignoring case. The first usual name takes precedence.

    Args:
        usual: the usual names, in lower case.
        left: the columns that have no role yet.
        names: all columns, for the error message.
        needed: raise an error if no column has a usual name. Otherwise the result is None.

    Raises:
        DataError: one is needed but none of the columns has a usual name, or several columns have one.
    """
    candidates = [name for name in left if name.lower() in usual]
    exact = [name for name in candidates if name.lower() == usual[0]]  # `label` takes precedence over `category`
    candidates = exact or candidates
    if len(candidates) == 1:
        return candidates[0]
    if not candidates and not needed:
        return None
    what = f"no column has a usual name for the {role}"
    if candidates:
        what = f"several columns could be the {role}: {', '.join(candidates)}"
    raise DataError(what, where=where, remedy=_remedy(role, names))


def check_header(given: str | int | None, label: str, labels: Sequence[Any], where: str) -> None:
    """Check that the header of a CSV file is a header, and that its first row is a row.

    Args:
        given: the column of the label as the user gave it. label: its name. labels: its values.

    Raises:
        DataError: the column is given by index and its name is a label, so the first row is lost; or the first label is
            the usual name of a column.
    """
    if isinstance(given, int) and label != str(given) and label in labels:
        what = f"the header is a row of the data: column {given} is called {label!r}, which is also a label"
        raise DataError(what, where=where, remedy="set task.header=false")
    first = str(labels[0]).strip().lower() if len(labels) else ""
    if label.isdigit() and first in LABEL and labels[0] not in labels[1:]:
        what = f"the first row is a header: its label is {labels[0]!r}"
        raise DataError(what, where=where, remedy="set task.header=true")


def note_on_groups(given: str | int | None, columns: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """A note on a column with the usual name of groups whose values repeat, if no group is given."""
    for name, values in columns.items():
        usual_name = re.sub(r"[ _-]?(id|name|number)$", "", name.lower()) in GROUP
        if given is None and usual_name and 2 * len(set(map(str, values))) <= len(values):
            what = f"column {name!r} repeats: samples with the same value may be on both sides of the split"
            return (f"{what}; task.columns.group={name} keeps them together",)
    return ()


def _remedy(role: str, names: Sequence[str]) -> str:
    listed = ", ".join(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..." for name in names)
    remedy = f"set task.columns.{role} to one of: {listed}"
    if all(name.isidentifier() or name.isdigit() for name in names):
        return remedy
    return f"{remedy}; if these are the first row rather than names, set task.header=false"
