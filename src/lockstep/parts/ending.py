"""The lines at the end of a training: results, time, where everything lies, and what to do next."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.parts.entry_line import results_text

if TYPE_CHECKING:
    from lockstep.core.training_run import Ending

_FILES = ("train.log", "metrics.jsonl", "tensorboard", "pictures")


def lines(run_dir: Path, ending: Ending) -> str:
    """The lines, with line breaks."""
    step, since, kept = ending.step, ending.since, ending.kept
    whence = f" since step {since:,}" if since else ""
    speed = (
        f", {ending.samples_per_s:,.0f} samples/s{whence} with evaluations and saves" if ending.samples_per_s else ""
    )
    found = [f"done: {step:,} steps, {ending.epoch:.4g} epochs, in {duration(ending.trained_s)}{speed}"]
    evaluations = _evaluations(run_dir / "metrics.jsonl")
    last = {name: value for name, value in ending.latest.items() if name.startswith("eval/")}
    evaluations = evaluations or ([(step, last)] if last else [])
    if evaluations:
        last_step, last = evaluations[-1]
        found.append(f"last result, of step {last_step:,}: {results_text(last)}")
        found += _best(evaluations, ending.compared, kept)
    there = [name for name in _FILES if (run_dir / name).exists()]
    there += [f"checkpoints of step{'s' * (len(kept) > 1)} {', '.join(map(str, sorted(kept)))}"] if kept else []
    found.append(f"{run_dir} has: {', '.join(there)}")
    if kept:
        place = shlex.quote(str(run_dir))
        found += [
            f"next: lockstep report {place}        # a page with curves and results",
            f"      lockstep predict {place} INPUT",
            f"      lockstep export {place} OUT    # the model, for use without Lockstep",
        ]
    return "\n".join(found)


def _best(
    evaluations: Sequence[tuple[int, Mapping[str, float]]], compared: tuple[str, str], kept: Sequence[int]
) -> list[str]:
    """A line on the best evaluation, and the latest of equal ones. None, where no evaluation has the result."""
    mode, metric = compared
    sign = -1.0 if mode == "min" else 1.0
    rated = [one for one in evaluations if math.isfinite(one[1].get(metric, math.nan))]
    if len(rated) < 2:
        return []
    step, best = max(rated, key=lambda one: (sign * one[1][metric], one[0]))
    if step == evaluations[-1][0]:
        return [f"best result by {mode} {metric}: the last"]
    lost = "" if step in kept else f"; its checkpoint was not kept: checkpoint.keep_best='{mode} {metric}' keeps it"
    return [f"best result by {mode} {metric}, of step {step:,}: {results_text(best)}{lost}"]


def duration(seconds: float) -> str:
    """For example `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.3g} s"


def _evaluations(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and results of each evaluation in a metrics.jsonl, by step. Empty: there is no such file."""
    found: dict[int, dict[str, float]] = {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"eval/' not in line:
                    continue
                try:
                    entry = json.loads(line)
                except ValueError:  # a kill has cut the line
                    continue
                found[int(entry["step"])] = {
                    name: value
                    for name, value in entry.items()
                    if name.startswith("eval/") and isinstance(value, int | float)
                }
    return sorted(found.items())
