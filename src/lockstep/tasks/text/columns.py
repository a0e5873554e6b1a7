"""Which columns of a table hold the texts and the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import DataError, did_you_mean
from lockstep.sources.table import Table

_SHOWN = 40  # characters of a column's name
_TEXT = (
    "text",
    "sentence",
    "content",
    "review",
    "comment",
    "utterance",
    "query",
    "question",
    "document",
    "body",
    "message",
    "tweet",
)
_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
)
_LABEL = ("label", "labels", "category", "class", "target", "intent", "topic", "sentiment")


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read."""

    text: tuple[str, ...]
    """The texts. Several columns are joined with a space."""
    pair: str | None
    """The second text of a pair."""
    label: str | None


def choose(
    table: Table,
    *,
    text: str | int | Sequence[str | int] | None,
    pair: str | int | None,
    label: str | int | None,
    needs_label: bool = True,
) -> Columns:
    """The columns of a table by role.

    Args:
        text, pair, label: names or places of columns. None: the column with a usual name, in any case.
        needs_label: whether a column with labels is needed.

    Raises:
        DataError: there is no such column, or none or several have a usual name. The error lists all columns.
    """
    names, where = list(table.columns), table.name
    given = [text] if isinstance(text, str | int) else list(text or [])
    texts = tuple(_named(column, names, "text", where) for column in given)
    second = None if pair is None else _named(pair, names, "pair", where)
    target: str | None = None
    if label is not None and (
        needs_label or str(label) in names or (isinstance(label, int) and 0 <= label < len(names) > 1)
    ):
        target = _named(label, names, "label", where)
    elif label is None:
        left = [name for name in names if name not in (*texts, second)]
        target = _usual(_LABEL, left, role="label", where=where, names=names, needed=needs_label)
    if not texts:
        left = [name for name in names if name not in (second, target)]
        lower = {name.lower(): name for name in left}
        known = next((pair for pair in _PAIRS if second is None and pair[0] in lower and pair[1] in lower), None)
        if known:
            texts, second = (lower[known[0]],), lower[known[1]]
        elif len(left) == 1 and (target is not None or not needs_label):
            texts = (left[0],)
        else:
            name = _usual(_TEXT, left, role="text", where=where, names=names, needed=True)
            assert name is not None
            texts = (name,)
    return Columns(texts, second, target)


def _named(wanted: str | int, names: Sequence[str], role: str, where: str) -> str:
    if str(wanted) in names:
        return str(wanted)
    if isinstance(wanted, int) and 0 <= wanted < len(names):
        return names[wanted]
    hint = did_you_mean(wanted, names)
    raise DataError(f"there is no column {wanted!r}", where=where, remedy=f"{hint}{_remedy(role, names)}")


def _usual(
    usual: Sequence[str], left: Sequence[str], *, role: str, where: str, names: Sequence[str], needed: bool
) -> str | None:
    """The column among `left` with a usual name; `names` are all columns, for the error."""
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
    rows = (
        ""
        if all(name.isidentifier() or name.isdigit() for name in names)
        else "; if these are not names but a first row, set task.header=false"
    )
    return f"set task.columns.{role} to one of: {listed}{rows}"
