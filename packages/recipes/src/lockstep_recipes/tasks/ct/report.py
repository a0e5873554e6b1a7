"""The text about an evaluation of risks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep_recipes.tasks.confusion import aligned
from lockstep_recipes.tasks.ct.metrics import FALLING

_WIDE = 28  # characters of a question
_FEW = 10  # with fewer labels of a class, bootstrap intervals are too narrow
_UNDEFINED = "undefined"
_SCORES = ("average_precision", "brier", "sensitivity", "specificity")
_HEADS = ("known", "yes", "no", "AUC (interval)", "avg. precision", "Brier", "sensitivity", "specificity")


def risk_report(values: Mapping[str, Tensor], questions: Sequence[str], *, threshold: float) -> str:
    """A table with a line for each question, the concordance of each event, and the reasons for undefined scores.

    Args:
        values: what `RiskMetrics.compute` returns.
        threshold: the risk threshold for sensitivity and specificity.
    """
    if "label_counts" not in values:
        return ""
    rows = [["question", *_HEADS]]
    reasons, few = [], []
    for place, question in enumerate(questions):
        known, yes, no = (int(count) for count in values["label_counts"][place])
        scores = [_number(values, f"{name}/{question}") for name in _SCORES]
        auc = _with_interval(values, "auc", question)
        rows.append([question[:_WIDE], f"{known:,}", f"{yes:,}", f"{no:,}", auc, *scores])
        bad = int(values["risks_not_finite"][place, 0])
        if bad:
            reasons.append(f"  {question}: undefined, because {bad:,} of {known:,} risks are not finite")
        elif not (yes and no):
            only = "no label is known" if not known else f"only {'yes' if yes else 'no'} is known"
            reasons.append(f"  {question}: AUC and average precision are undefined, because {only}")
        elif min(yes, no) < _FEW:
            few.append(question)
    lines = [f"scores by question; sensitivity and specificity at risk {threshold:g}:", *aligned(rows)]
    events = [name.partition("/")[2] for name in values if name.startswith("concordance/")]
    lines += [
        f"  {event}: concordance over horizons {_with_interval(values, 'concordance', event)}" for event in events
    ]
    if FALLING in values:
        falling, patients = int(values[FALLING]), int(values["patients"][0, 0])
        advice = "; task.head=monotone or hazard prevents this" if falling else ""
        lines.append(
            f"  patients whose risk decreases from a horizon to a later one: {falling:,} of {patients:,}{advice}"
        )
    if few:
        reasons.append(f"  fewer than {_FEW} labels of yes or no, so the intervals are too narrow: {', '.join(few)}")
    return "\n".join([*lines, *reasons])


def _number(values: Mapping[str, Tensor], name: str) -> str:
    return f"{float(values[name]):.4f}" if name in values else _UNDEFINED


def _with_interval(values: Mapping[str, Tensor], score: str, name: str) -> str:
    if f"{score}/{name}" not in values:
        return _UNDEFINED
    limits = [values.get(f"{score}_{side}/{name}") for side in ("low", "high")]
    interval = (
        "" if None in limits else f" ({', '.join(f'{float(limit):.3f}' for limit in limits if limit is not None)})"
    )
    return f"{float(values[f'{score}/{name}']):.4f}{interval}"
