"""train.log: one line per entry, for people; and how a line is written."""

from __future__ import annotations

import datetime
from pathlib import Path

_FIRST = ["train/loss", "eval/loss", "train/lr", "train/grad_norm", "train/samples_per_s", "train/wait_share"]
_HIDDEN = ("memory/peak_mb/rank", "step", "epoch", "time_s")


def line(entry: dict[str, float], total: int) -> str:
    """`step 100/690  epoch 4.35  loss 0.1234 ...` - zero counters and per-rank memory are left to metrics.jsonl."""
    parts = [f"step {entry['step']:.0f}/{total}", f"epoch {entry['epoch']:.2f}"]
    names = [name for name in _FIRST if name in entry]
    names += [name for name in entry if name not in names and not name.startswith(_HIDDEN)]
    for name in names:
        if name in ("train/skipped", "eval/bad") and not entry[name]:
            continue
        label = name.removeprefix("train/").replace("memory/peak_mb", "peak_mb")
        parts.append(f"{label} {_number(entry[name])}")
    return "  ".join(parts)


def _number(value: float) -> str:
    if float(value).is_integer() and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"


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
