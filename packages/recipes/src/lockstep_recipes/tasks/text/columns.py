"""The columns of a table that contain the texts and the labels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.readers.columns import LABEL, check_header, named, note_on_groups, usual
from lockstep_recipes.tasks.readers.table import Source, Table
from lockstep_recipes.tasks.text.options import TextColumnsOptions

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
    group: str | None = None
    """The group that stays on one side of the split."""


def read(source: Source, given: TextColumnsOptions, *, needs_label: bool = True) -> tuple[Table, Columns]:
    """A table, and the columns that `choose` finds.

    If the user names no column, and neither of two columns has a usual name, their values decide: labels are few and
    repeat, texts differ. If the name of the label column is one of its labels, it is a first row rather than a header.
    `Table.notes` then reports the choice.

    Raises:
        DataError: see `choose`.
    """
    table = source.read()
    try:
        chosen = choose(table, given, needs_label=needs_label)
    except DataError:
        label = None if given.text or given.pair is not None or given.label is not None else _label_by_values(table)
        if label is None:
            raise
    else:
        if chosen.label is not None and source.name.endswith((".csv", ".tsv")):
            check_header(given.label, chosen.label, table.columns[chosen.label], table.name)
        return replace(table, notes=(*table.notes, *note_on_groups(given.group, table.columns))), chosen
    note = f"column {label!r} is used as the label, because its values repeat; task.columns.label overrides this"
    if source.header and source.name.endswith((".csv", ".tsv")) and label in table.columns[label]:
        note = (
            f"the first row is used as a sample, because {label!r} is one of the labels; task.header=false makes "
            "this explicit"
        )
        place = list(table.columns).index(label)
        table = replace(source, header=False).read()
        label = list(table.columns)[place]
    text = next(name for name in table.columns if name != label)
    return replace(table, notes=(*table.notes, note)), Columns((text,), None, label)


def _label_by_values(table: Table) -> str | None:
    """Of two columns, the one with the labels: it has at most half as many distinct values as rows, and shorter ones
    than the other column, whose values mostly differ."""
    if len(table.columns) != 2:
        return None
    columns = {name: [str(value) for value in values] for name, values in table.columns.items()}
    few = [name for name, values in columns.items() if 2 * len(set(values)) <= len(values)]
    lengths = {name: sum(map(len, values)) for name, values in columns.items()}
    return few[0] if len(few) == 1 and lengths[few[0]] == min(lengths.values()) else None


def choose(table: Table, given: TextColumnsOptions, *, needs_label: bool = True) -> Columns:
    """The columns of a table by role.

    Args:
        given: names or indices of columns. None: the column with a usual name, ignoring case.
        needs_label: whether a column with labels is needed.

    Raises:
        DataError: there is no such column, or none or several have a usual name. The error lists all columns.
    """
    names, where = list(table.columns), table.name
    label, wanted = given.label, [given.text] if isinstance(given.text, str | int) else given.text or []
    texts = tuple(named(column, names, "text", where) for column in wanted)
    group = None if given.group is None else named(given.group, names, "group", where)
    second = None if given.pair is None else named(given.pair, names, "pair", where)
    target: str | None = None
    if label is not None and (
        needs_label or str(label) in names or (isinstance(label, int) and 0 <= label < len(names) > 1)
    ):
        target = named(label, names, "label", where)
    elif label is None:
        left = [name for name in names if name not in (*texts, second, group)]
        target = usual(LABEL, left, role="label", where=where, names=names, needed=needs_label)
    if not texts:
        left = [name for name in names if name not in (second, target, group)]
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
    return Columns(texts, second, target, group)
