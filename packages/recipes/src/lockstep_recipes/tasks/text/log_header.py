"""Lines about the texts and the model for the head of the log."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.errors import number_of
from lockstep_recipes.tasks import confusion
from lockstep_recipes.tasks.readers import duplicates
from lockstep_recipes.tasks.readers.labels import count_labels
from lockstep_recipes.tasks.text.data import TextData
from lockstep_recipes.tasks.text.options import EMBEDDING_BAG
from lockstep_recipes.tasks.vision.readers.class_table import listed

_ROLES = ("text", "pair", "label")
_FEW = 10_000  # texts. With 160 to 4,000 texts, new transformers learned less than a bag of embeddings: docs/text.md.

_NOTICEABLE = 0.01  # of the tokens are unknown


def of_model(name: str | None, *, kind: str, parameters: int, new: Sequence[str], texts: int) -> list[str]:
    """Lines about the weights that are new.

    Args:
        name: the name of a pretrained model. None: all weights are new.
        kind: the `model_type` of the model.
        parameters: the number of parameters, or 0 if it is unknown.
        new: names of the weights that the pretrained model lacks.
        texts: the number of training texts.
    """
    if name is not None:
        return [f"not in {name}, so initialised: {listed(new)}"] if new else []
    size = f" of {parameters:,} parameters" if parameters else ""
    what = f"no task.model: a new {kind}{size} learns from only these {number_of(texts, 'text')}"
    lines = [f"{what}; task.model=NAME fine-tunes a pretrained model, which learns more"]
    if kind != EMBEDDING_BAG and texts < _FEW:
        few = f"fewer than {_FEW:,} texts are few for a new transformer"
        lines.append(
            f"  {few}: counting words (TF-IDF) or task.scratch.architecture={EMBEDDING_BAG} will probably be better"
        )
    return lines


def of_data(
    name: str, data: TextData, *, labels: Sequence[str], max_length: int, notes: Sequence[str] = ()
) -> list[str]:
    """Lines about the texts that were read, by class, and the texts that were truncated or left out.

    Args:
        name: `training` or `evaluation`.
        notes: remarks about how the texts were read.
    """
    texts, tokens, counts = data.texts, data.tokens, _counts(data, labels)
    named = {role: texts.columns[role] for role in _ROLES if texts.columns[role]}
    columns = ", ".join(
        f"{role} {value if isinstance(value, str) else ' + '.join(value)}" for role, value in named.items()
    )
    lengths = f"{int(data.lengths.mean())} on average, {int(data.lengths.max())} at most" if len(data) else "none"
    lines = [
        f"{name}: {number_of(len(data), 'text')} from {texts.source} ({columns}), tokens {lengths}",
        f"  by label: {confusion.listed(counts)}",
    ]
    if tokens.truncated:
        share, lost = tokens.truncated / len(texts), tokens.dropped / (tokens.dropped + int(tokens.ends[-1]))
        cut = f"{tokens.truncated:,} of {len(texts):,} texts ({share:.1%}), {lost:.2%} of their tokens"
        lines.append(f"  truncated to {max_length} tokens: {cut}")
    if tokens.unknown >= _NOTICEABLE * tokens.words > 0:
        what = f"{tokens.unknown:,} of {tokens.words:,} tokens ({tokens.unknown / tokens.words:.1%})"
        lines.append(f"  WARNING: the tokenizer does not know {what}; they are all the same to the model")
    if texts.dropped:
        lines.append(f"  left out: {number_of(texts.dropped, 'empty text')}")
    return lines + [f"  {note}" for note in notes]


def of_absent_labels(data: TextData, labels: Sequence[str]) -> list[str]:
    """A line about labels that do not occur in the evaluation texts."""
    absent = [label for label, count in _counts(data, labels).items() if not count]
    if not absent:
        return []
    return [
        f"  not evaluated, because no evaluation text has them: {len(absent)} of {len(labels)} labels "
        f"({listed(absent)})"
    ]


def _counts(data: TextData, labels: Sequence[str]) -> dict[str, int]:
    return count_labels(labels, data.labels if data.rows is None else data.labels[data.rows])


def of_doubles(training: TextData, evaluation: TextData | None, labels: Sequence[str]) -> list[str]:
    """Lines about duplicate texts, and about labels that differ only in case or spaces."""

    def rows(data: TextData) -> duplicates.TextRows:
        places = range(len(data)) if data.rows is None else data.rows
        return duplicates.TextRows(
            len(data),
            content=lambda index: data.texts.encoded(int(places[index])),
            label=lambda index: data.labels[places[index]].tobytes(),
            where=data.where,
        )

    lines = duplicates.of_texts(rows(training), None if evaluation is None else rows(evaluation))
    return [*lines, *duplicates.of_names(labels)]
