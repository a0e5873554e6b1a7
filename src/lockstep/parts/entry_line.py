"""An entry of the log as one line of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_FIRST = ["train/loss", "eval/loss", "train/lr", "train/grad_norm"]
_FIRST += ["train/samples_per_s", "train/wait_share", "train/tflops_per_s"]
_SHORT = {"train/samples_per_s": "samples/s", "train/tflops_per_s": "TFLOP/s", "memory/peak_mb": "peak MB"}
_MANY = 6  # the most results by class or question in the line, of all metrics together
_HIDDEN = ("memory/", "health/", "step", "epoch", "time_s", "time/")  # prefixes; names in _SHORT are still shown


def entry_line(entry: Mapping[str, float], last_step: int) -> str:
    """`step 100/690  epoch 4.35  loss 0.1234 ...`.

    Zero counters are left out. So are memory by purpose, the times of each rank, learning rates by depth, the ends of
    intervals (`eval/auc_low`, `eval/auc_high`), and results by class or question, such as `eval/auc/QUESTION`, if there
    are more than 6 of them. metrics.jsonl has them.
    """
    parts = [f"step {entry['step']:.0f}/{last_step}", f"epoch {entry['epoch']:.2f}"]
    all_names = list(entry)
    of_training = all_names[: all_names.index("train/lr")] if "train/lr" in entry else []  # loss, and its metrics
    names = [name for name in of_training if name.startswith("train/")]
    names += [name for name in _FIRST if name in entry and name not in names]
    names += [
        name
        for name in entry
        if name not in names and (name in _SHORT or not (name.startswith(_HIDDEN) or "/level-" in name))
    ]
    for name in shown(names, entry):
        if name == "train/wait_share":
            parts.append(f"wait {entry[name]:.0%}")
        elif name == "train/tflops_per_s":
            parts.append(_speed(entry[name]))
        else:
            parts.append(f"{_SHORT.get(name, name.removeprefix('train/'))} {_number(entry[name])}")
    if "memory/before_evaluation_mb" in entry:
        before, after = (entry[f"memory/{when}_evaluation_mb"] for when in ("before", "after"))
        parts.append(f"MB before {before:,.0f} after {after:,.0f} peak +{entry['memory/evaluation_mb']:,.0f}")
    return "  ".join(parts)


def _speed(tflops: float) -> str:
    """A speed with the unit that makes it a number from 0.1."""
    for unit in ("TFLOP/s", "GFLOP/s", "MFLOP/s"):
        if abs(tflops) >= 0.1:
            return f"{unit} {_number(tflops)}"
        tflops *= 1000
    return f"kFLOP/s {_number(tflops)}"


def results_text(results: Mapping[str, float]) -> str:
    """Results of an evaluation: `loss 0.1234  accuracy 0.98 ...`, with the omissions of `entry_line`."""
    return "  ".join(f"{name.removeprefix('eval/')} {_number(results[name])}" for name in shown(results, results))


def shown(names: Iterable[str], entry: Mapping[str, float]) -> Iterator[str]:
    """The names without members of large families, ends of intervals, and zero counters."""
    left = [name for name in names if not is_end_of_interval(name, entry)]
    families = Counter(_family(name, entry) for name in left)
    for name in left:
        is_zero = name.endswith(("/skipped", "/bad")) and not entry[name]
        is_many = bool(_family(name, entry)) and families[_family(name, entry)] > _MANY
        if not (is_zero or is_many):
            yield name


def is_end_of_interval(name: str, entry: Mapping[str, float]) -> bool:
    """True for `eval/auc_low/QUESTION` and `eval/auc_high/QUESTION`, if both and `eval/auc/QUESTION` are there."""
    for end, other in (("_low", "_high"), ("_high", "_low")):
        if end in name and {name.replace(end, "", 1), name.replace(end, other, 1)} <= entry.keys():
            return True
    return False


def _family(name: str, entry: Mapping[str, float]) -> str:
    """The names that are left out together: losses by head, learning rates by group, and all other results by class or
    question, such as `eval/auc/QUESTION`. Empty for other names, such as `eval/loss` and `eval/SET/loss`."""
    family = name.rpartition("/")[0]
    if "/" not in family or f"{family}/samples" in entry:
        return ""
    return family if family.endswith(("/loss", "/lr")) else "details"


def _number(value: float) -> str:
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.4g}"
