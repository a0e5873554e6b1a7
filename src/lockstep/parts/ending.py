"""The lines at the end of a training: results, time, where everything is, and what to do next."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.checkpoint import manifest
from lockstep.core.errors import number_of
from lockstep.parts.entry_line import results_text

if TYPE_CHECKING:
    from lockstep.core.build import Run
    from lockstep.core.config.sections import RunConfig

_FILES = ("train.log", "metrics.jsonl", "tensorboard", "pictures")


def tell(run: Run, latest: Mapping[str, float], elapsed_s: float) -> None:
    """Give the writers the last lines of the log."""
    for writer in run.writers:
        writer.end(lines(run, latest, elapsed_s))


def lines(run: Run, latest: Mapping[str, float], elapsed_s: float) -> str:
    """The lines, with line breaks.

    Args:
        latest: the last value of everything logged.
        elapsed_s: seconds of training since this start, evaluations and saves included.
    """
    run_dir, step, since, per_epoch = run.folder, run.state.step, run.first_step, run.plan.steps_per_epoch
    kept = [checkpoint.step for checkpoint in manifest.listed(run_dir / "checkpoints")]
    whence = f" since step {since:,}" if since else ""
    samples = (step - since) / per_epoch * run.plan.length
    elapsed_s = max(elapsed_s, 1e-9)
    speed = f", {samples / elapsed_s:,.0f} samples/s{whence} with evaluations and saves" if samples else ""
    trained = duration(run.stopping.earlier_s + elapsed_s)
    count = f"{step / per_epoch:.4g}"
    epochs = f", {count} epoch{'s' * (count != '1')}" if step / per_epoch > 1e-6 else ""  # a stream may have none
    found = [f"done: {number_of(step, 'step')}{epochs}, in {trained}{speed}"]
    evaluations = _evaluations(run_dir / "metrics.jsonl")
    last = {name: value for name, value in latest.items() if name.startswith("eval/")}
    evaluations = evaluations or ([(step, last)] if last else [])
    if evaluations:
        last_step, last = evaluations[-1]
        found.append(f"last result, of step {last_step:,}: {results_text(last)}")
        takes_first = run.config.checkpoint.keep_best is None and run.config.train.stop_when is not None
        found += _best(evaluations, _compared(run.config), kept, takes_first=takes_first)
    there = [name for name in _FILES if (run_dir / name).exists()]
    there += [f"checkpoints of step{'s' * (len(kept) > 1)} {', '.join(map(str, sorted(kept)))}"] if kept else []
    found.append(f"{run_dir} has: {', '.join(there)}")
    return "\n".join([*found, *(_next(run_dir, run.config, by_loop=run.by_loop) if kept else ())])


def _next(run_dir: Path, config: RunConfig, *, by_loop: bool) -> list[str]:
    """What to do with a trained model. Commands only find a task that the config names; a script passed its own."""
    place = shlex.quote(str(run_dir))
    lines = [f"next: lockstep report {place}        # a page with curves and results"]
    if by_loop:
        return [*lines, '      loop.save("model.pt") writes the weights for plain torch']
    if "kind" in config.task:
        return [
            *lines,
            f"      lockstep predict {place} INPUT  # your files, if the task can read them; or --samples 5",
            f"      lockstep export {place} OUT    # the model, for use without Lockstep",
        ]
    return [
        *lines,
        "      in Python, with the Trainer and the task of this run:",
        "      trainer.predict(task, data)    # outputs for each sample of data; without data: of the evaluation data",
        '      trainer.export("OUT", task)    # the model, for use without Lockstep',
    ]


def _compared(config: RunConfig) -> tuple[str, str]:
    """`min` or `max`, and the name of the result that defines the best evaluation."""
    if config.checkpoint.keep_best:
        mode, metric = config.checkpoint.keep_best.split()
        return mode, metric
    rule = config.train.stop_when
    return (rule.mode, rule.metric) if rule else ("min", "eval/loss")


def _best(
    evaluations: Sequence[tuple[int, Mapping[str, float]]],
    compared: tuple[str, str],
    kept: Sequence[int],
    *,
    takes_first: bool,
) -> list[str]:
    """A line on the best evaluation. None if no evaluation has the result.

    Args:
        takes_first: of equal ones, take the first, like `train.stop_when`, and not the latest, like `keep_best`.
    """
    mode, metric = compared
    sign = -1.0 if mode == "min" else 1.0
    rated = [one for one in evaluations if math.isfinite(one[1].get(metric, math.nan))]
    if len(rated) < 2:
        return []
    step, best = max(rated, key=lambda one: (sign * one[1][metric], -one[0] if takes_first else one[0]))
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
    """Step and results of each evaluation in a metrics.jsonl, by step. Empty: the file does not exist."""
    found: dict[int, dict[str, float]] = {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"eval/' not in line:
                    continue
                try:
                    entry = json.loads(line)
                except ValueError:  # a kill has truncated the line
                    continue
                found[int(entry["step"])] = {
                    name: value
                    for name, value in entry.items()
                    if name.startswith("eval/") and isinstance(value, int | float)
                }
    return sorted(found.items())
