"""The finders of tasks with texts, and what these get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import Extent, of_error
from lockstep_recipes.tasks.text.data import TextData
from lockstep_recipes.tasks.text.faults import copies, forms, labels, texts
from lockstep_recipes.tasks.text.faults.view import TextSplit, TextView, chosen

OF_TEXTS = (
    texts.refused,
    texts.damaged,
    texts.not_texts,
    texts.lengths,
    texts.repeated,
    texts.one_line,
    forms.other_script,
    forms.cut_off,
    copies.across,
    copies.within,
)
OF_LABELLED = (*OF_TEXTS, texts.markup, labels.counts, labels.names, labels.conflicts, labels.leaks)


def view_of_texts(
    train: Callable[[], TextData],
    evaluation: Callable[[], TextData | None],
    names: Callable[[], Sequence[str]],
    extent: Extent,
) -> TextView:
    """Labelled texts for the finders. What the task refuses is a finding."""
    splits, refused = [], []
    for name, get in (("training", train), ("evaluation", evaluation)):
        try:
            data = get()
        except DataError as error:
            refused.append(of_error(error))
        else:
            splits += [] if data is None else [_split(name, data, names(), extent)]
    return TextView(splits, names() if splits else (), refused, extent.is_short)


def _split(name: str, data: TextData, names: Sequence[str], extent: Extent) -> TextSplit:
    rows = chosen(len(data), extent, lambda row: len(data[row].text))
    samples = [data[row] for row in rows]
    found = [text if pair is None else f"{text}\n{pair}" for *_, text, pair in samples]
    codes = data.sample_labels[rows]
    one = codes.ndim == 1
    written = [names[code] if one else ", ".join(names[place] for place in code.nonzero()[0]) for code in codes]
    columns = [[text for *_, text, _ in samples], [pair for *_, pair in samples if pair is not None]]
    return TextSplit(name, found, lambda index: data.where(rows[index]), written, columns)
