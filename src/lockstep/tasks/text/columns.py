"""The columns of a table that hold the texts and the labels."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.tasks.readers.columns import LABEL, named, usual
from lockstep.tasks.readers.table import Table
from lockstep.tasks.text.options import ColumnsOptions

_TEXT: tuple[str, ...] = ("text", "sentence", "content", "review", "comment", "utterance", "query", "question")
_TEXT += ("document", "body", "message", "tweet")
_PAIRS = {"text": "text_pair", "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2"}
_PAIRS |= {"text1": "text2"}


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read."""

    text: tuple[str, ...]
    """The texts. Several columns are joined with a space."""
    pair: str | None
    """The second text of a pair."""
    label: str | None


def choose(table: Table, given: ColumnsOptions, *, needs_label: bool = True) -> Columns:
    """The columns of a table by role.

    Args:
        given: names or places of columns. None: the column with a usual name, in any case.
        needs_label: whether a column with labels is needed.

    Raises:
        DataError: there is no such column, or none or several have a usual name. The error lists all columns.
    """
    names, where = list(table.columns), table.name
    label, wanted = given.label, [given.text] if isinstance(given.text, str | int) else given.text or []
    texts = tuple(named(column, names, "text", where) for column in wanted)
    second = None if given.pair is None else named(given.pair, names, "pair", where)
    target: str | None = None
    if label is not None and (
        needs_label or str(label) in names or (isinstance(label, int) and 0 <= label < len(names) > 1)
    ):
        target = named(label, names, "label", where)
    elif label is None:
        left = [name for name in names if name not in (*texts, second)]
        target = usual(LABEL, left, role="label", where=where, names=names, needed=needs_label)
    if not texts:
        left = [name for name in names if name not in (second, target)]
        lower = {name.lower(): name for name in left}
        known = [pair for pair in _PAIRS.items() if second is None and pair[0] in lower and pair[1] in lower]
        if known:
            texts, second = (lower[known[0][0]],), lower[known[0][1]]
        elif len(left) == 1 and (target is not None or not needs_label):
            texts = (left[0],)
        else:
            name = usual(_TEXT, left, role="text", where=where, names=names, needed=True)
            assert name is not None
            texts = (name,)
    return Columns(texts, second, target)
