"""train.log: one line per entry, for people; and how a line is written."""

from __future__ import annotations

import datetime
from pathlib import Path

_FIRST = ["train/loss", "eval/loss", "train/lr", "train/grad_norm", "train/samples_per_s", "train/wait_share"]
_SHORT = {"train/samples_per_s": "samples/s", "memory/peak_mb": "peak MB"}
_HIDDEN = ("memory/", "step", "epoch", "time_s")  # and yet what is in _SHORT is shown


def line(entry: dict[str, float], total: int) -> str:
    """`step 100/690  epoch 4.35  loss 0.1234 ...` - zero counters, memory but its peak, and rates by depth are left to metrics.jsonl."""
    parts = [f"step {entry['step']:.0f}/{total}", f"epoch {entry['epoch']:.2f}"]
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


class TextLog:
    """Appends lines with the time to `path`."""

    def __init__(self, path: Path, total: int) -> None:
        self.file = path.open("a", buffering=1)
        self.total = total

    def record(self, entry: dict[str, float]) -> None:
        self.message(line(entry, self.total))

    def progress(self, step: int) -> None:
        pass

    def message(self, text: str) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.file.write(f"{now}  {text}\n")

    def close(self) -> None:
        self.file.close()
