"""An entry of the log as one line of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_FIRST = ["train/loss", "eval/loss", "train/lr", "train/grad_norm"]
_FIRST += ["train/samples_per_s", "train/wait_share", "train/tflops_per_s"]
_SHORT = {"train/samples_per_s": "samples/s", "train/tflops_per_s": "TFLOP/s", "memory/peak_mb": "peak MB"}
_MANY = 6  # the most results by class or question in the line
_HIDDEN = ("memory/", "health/", "step", "epoch", "time_s", "time/")  # prefixes; names in _SHORT are still shown


def entry_line(entry: Mapping[str, float], last_step: int) -> str:
    """`step 100/690  epoch 4.35  loss 0.1234 ...`.

    Zero counters are left out. So are memory (except its peak), the times of each rank, learning rates by depth, the
    ends of intervals (`eval/auc_low`, `eval/auc_high`), and results such as `eval/auc/QUESTION` of more than 6
    questions. metrics.jsonl has them.
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
    families = Counter(_family(name) for name in entry)
    for name in names:
        is_zero = name.endswith(("/skipped", "/bad")) and not entry[name]
        is_many = bool(_family(name)) and families[_family(name)] > _MANY
        if not (is_zero or is_many or is_end_of_interval(name, entry)):
            yield name


def is_end_of_interval(name: str, entry: Mapping[str, float]) -> bool:
    """True for `eval/auc_low/QUESTION` and `eval/auc_high/QUESTION`, if both and `eval/auc/QUESTION` are there."""
    for end, other in (("_low", "_high"), ("_high", "_low")):
        if end in name and {name.replace(end, "", 1), name.replace(end, other, 1)} <= entry.keys():
            return True
    return False


def _family(name: str) -> str:
    """`eval/auc` for `eval/auc/QUESTION`. Empty for names of two parts."""
    parts = name.split("/", 2)
    return "/".join(parts[:2]) if len(parts) == 3 else ""


def _number(value: float) -> str:
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.4g}"
