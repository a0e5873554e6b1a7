"""Confusion matrices as readable text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

_MATRIX = 12  # up to this many classes, the whole matrix is shown
_PAIRS = 10  # pairs of classes that are shown if there are more
_WIDE = 24  # characters of a class name
_CLASSES = 8  # up to this many classes, all counts are listed


def by_class(confusion: Tensor, labels: Sequence[str]) -> str:
    """Precision, recall, F1 and number of samples of each class, and the means over classes.

    Args:
        confusion: counts by (truth, prediction). If a sample may have several labels: by (class, truth, prediction).
    """
    counts = confusion.double()
    if counts.ndim == 2:
        right, true, said = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
    else:
        right, true, said = counts[:, 1, 1], counts[:, 1, :].sum(dim=1), counts[:, :, 1].sum(dim=1)
    precision, recall, f1 = right / said.clamp(min=1), right / true.clamp(min=1), 2 * right / (true + said).clamp(min=1)
    wide = max(len("class"), *(min(_WIDE, len(label)) for label in labels))
    lines = [f"  {'class':<{wide}}  precision  recall      F1  samples"]
    for number, label in enumerate(labels):
        scores = f"{float(precision[number]):9.4f}  {float(recall[number]):6.4f}  {float(f1[number]):6.4f}"
        lines.append(f"  {_short(label):<{wide}}  {scores}  {int(true[number]):7,}")
    # torchmetrics also leaves classes that neither occur nor are predicted out of the mean.
    seen = ((true + said) > 0) | (counts.ndim > 2)
    mean = [float(column[seen].mean()) if seen.any() else 0.0 for column in (precision, recall, f1)]
    lines.append(f"  {'mean':<{wide}}  {mean[0]:9.4f}  {mean[1]:6.4f}  {mean[2]:6.4f}  {int(true.sum()):7,}")
    return "\n".join(lines)


def confusions(confusion: Tensor, labels: Sequence[str]) -> str:
    """The matrix of truth by prediction. With many classes, only the pairs that are confused most."""
    if len(labels) > _MATRIX:
        errors = confusion.clone().fill_diagonal_(0)
        order = errors.flatten().argsort(descending=True, stable=True)[:_PAIRS].tolist()
        pairs = [
            (int(errors.flatten()[place]), labels[place // len(labels)], labels[place % len(labels)]) for place in order
        ]
        lines = [f"  {count:6,}  {truth} predicted as {said}" for count, truth, said in pairs if count]
        return "\n".join(["  most confused:", *lines]) if lines else "  no sample was misclassified"
    rows = [["truth \\ prediction", *(_short(label) for label in labels)]]
    for label, row in zip(labels, confusion.tolist(), strict=True):
        rows.append([_short(label), *(f"{int(count):,}" for count in row)])
    return "\n".join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the first column is left-aligned, all others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.rjust(wide) for cell, wide in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([f"  {row[0]:<{widths[0]}}", *cells]))
    return lines


def listed(counts: Mapping[str, int]) -> str:
    """Classes with their counts. With many classes, only the most and the least frequent."""
    ordered = sorted(counts.items(), key=lambda item: -item[1]) if len(counts) > _CLASSES else list(counts.items())
    named = [f"{name} ({count:,})" for name, count in ordered]
    if len(named) <= _CLASSES:
        return ", ".join(named)
    return f"{len(named)} in all; most: {', '.join(named[:3])}; fewest: {', '.join(named[-3:])}"


def _short(label: str) -> str:
    return label if len(label) <= _WIDE else f"{label[: _WIDE - 3]}..."
