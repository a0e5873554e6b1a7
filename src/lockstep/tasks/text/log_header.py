"""What the log's head says of texts."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sources.labels import count_labels
from lockstep.tasks import confusion
from lockstep.tasks.text.data import TextData
from lockstep.tasks.text.options import EMBEDDING_BAG

_ROLES = ("text", "pair", "label")
_SHOWN = 8
# Measured on 160 to 4,000 texts, where new transformers stayed below a bag of embeddings: docs/text.md.
_FEW = 10_000


def of_model(name: str | None, kind: str, parameters: int, new: Sequence[str], texts: int) -> list[str]:
    """Which weights are new.

    Args:
        name: of a pretrained model, and new: names of the weights that it lacks. kind: `model_type` of the model.
    """
    if name is not None:
        return (
            [f"not in {name}, so new: {', '.join(new[:_SHOWN])}{', ...' if len(new) > _SHOWN else ''}"] if new else []
        )
    size = f" of {parameters:,} parameters" if parameters else ""
    what = f"no task.model: a new {kind}{size} learns from these {texts:,} texts alone"
    found = [f"{what}; task.model=NAME fine-tunes a pretrained model, which learns more"]
    if kind != EMBEDDING_BAG and texts < _FEW:
        few = f"fewer than {_FEW:,} texts are few for a new transformer"
        found.append(
            f"  {few}: expect less than from words counted (TF-IDF) or from task.scratch.architecture={EMBEDDING_BAG}"
        )
    return found


def of_data(name: str, data: TextData, labels: Sequence[str], max_length: int) -> list[str]:
    """What was read, by class, what was cut off, and what was left out. name: `training` or `evaluation`."""
    texts, tokens, counts = data.texts, data.tokens, _counts(data, labels)
    named = {role: texts.columns[role] for role in _ROLES if texts.columns[role]}
    columns = ", ".join(
        f"{role} {value if isinstance(value, str) else ' + '.join(value)}" for role, value in named.items()
    )
    lengths = f"{int(data.lengths.mean())} on average, {int(data.lengths.max())} at most" if len(data) else "none"
    found = [
        f"{name}: {len(data):,} texts from {texts.source} ({columns}), tokens {lengths}",
        f"  by label: {confusion.listed(counts)}",
    ]
    if tokens.truncated:
        share, lost = tokens.truncated / len(texts), tokens.dropped / (tokens.dropped + int(tokens.ends[-1]))
        cut = f"{tokens.truncated:,} of {len(texts):,} texts ({share:.1%}), {lost:.2%} of their tokens"
        found.append(f"  cut to {max_length} tokens: {cut}")
    if texts.dropped:
        found.append(f"  left out: {texts.dropped:,} empty texts")
    return found


def of_reading(data: TextData) -> list[str]:
    """What a person should know of the way in which the texts were read."""
    return [f"  {told}" for told in data.texts.told]


def of_absent_labels(data: TextData, labels: Sequence[str]) -> list[str]:
    """Labels that no text of the evaluation has."""
    absent = [label for label, count in _counts(data, labels).items() if not count]
    if not absent:
        return []
    shown = ", ".join(absent[:_SHOWN]) + (", ..." if len(absent) > _SHOWN else "")
    return [f"  not evaluated, since no text there has them: {len(absent)} of {len(labels)} labels ({shown})"]


def _counts(data: TextData, labels: Sequence[str]) -> dict[str, int]:
    return count_labels(labels, data.labels if data.rows is None else data.labels[data.rows])
