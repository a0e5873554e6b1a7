"""An entry of the log as one line of text."""

from __future__ import annotations

from collections.abc import Mapping

_FIRST = ["train/loss", "eval/loss", "train/lr", "train/grad_norm", "train/samples_per_s", "train/wait_share"]
_SHORT = {"train/samples_per_s": "samples/s", "memory/peak_mb": "peak MB"}
_HIDDEN = ("memory/", "step", "epoch", "time_s")  # prefixes; names in _SHORT are shown all the same


def entry_line(entry: Mapping[str, float], last_step: int) -> str:
    """`step 100/690  epoch 4.35  loss 0.1234 ...`.

    Counters that are zero are left out. So are memory (except its peak) and learning rates by depth, which
    metrics.jsonl has.
    """
    parts = [f"step {entry['step']:.0f}/{last_step}", f"epoch {entry['epoch']:.2f}"]
    names = [name for name in _FIRST if name in entry]
    names += [
        name
        for name in entry
        if name not in names and (name in _SHORT or not (name.startswith(_HIDDEN) or "/level-" in name))
    ]
    for name in names:
        if name in ("train/skipped", "eval/bad") and not entry[name]:
            continue
        if name == "train/wait_share":
            parts.append(f"wait {entry[name]:.0%}")
        else:
            parts.append(f"{_SHORT.get(name, name.removeprefix('train/'))} {_number(entry[name])}")
    return "  ".join(parts)


def _number(value: float) -> str:
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.4g}"
