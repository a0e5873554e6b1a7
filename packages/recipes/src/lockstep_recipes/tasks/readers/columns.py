"""Columns of a table by their role: named by the user, or found by a usual name."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.errors import DataError, did_you_mean

LABEL = ("label", "labels", "category", "class", "target", "intent", "topic", "sentiment")
"""Usual names of columns that hold labels."""
_SHOWN = 40  # characters of a column's name


def named(wanted: str | int, names: Sequence[str], role: str, where: str) -> str:
    """The name of a column that is given by its name, or by its place counted from 0.

    Args:
        names: all columns.
        role: the key in `task.columns`, for the error.
        where: the table, for the error.

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
    """The column among `left` that has a usual name, in any case. The first usual name wins over the others.

    Args:
        usual: the usual names, in lower case.
        left: the columns that have no role yet.
        names: all columns, for the error.
        needed: raise an error where no column has a usual name. Otherwise the result is then None.

    Raises:
        DataError: none of the columns has a usual name and one is needed, or several columns have.
    """
    candidates = [name for name in left if name.lower() in usual]
    exact = [name for name in candidates if name.lower() == usual[0]]  # `label` wins over `category`
    candidates = exact or candidates
    if len(candidates) == 1:
        return candidates[0]
    if not candidates and not needed:
        return None
    what = f"no column looks like the {role}"
    if candidates:
        what = f"which column is the {role}? {', '.join(candidates)} all might be"
    raise DataError(what, where=where, remedy=_remedy(role, names))


def _remedy(role: str, names: Sequence[str]) -> str:
    listed = ", ".join(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..." for name in names)
    remedy = f"set task.columns.{role} to one of: {listed}"
    if all(name.isidentifier() or name.isdigit() for name in names):
        return remedy
    return f"{remedy}; if these are not names but a first row, set task.header=false"
