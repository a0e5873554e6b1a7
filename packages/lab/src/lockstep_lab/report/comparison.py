"""Several runs side by side: differences of their configs, their curves, and their last results."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.errors import UsageError
from lockstep.drawing.markup import Markup, element, shortened
from lockstep.parts.ending import duration
from lockstep_lab.report import charts, judgement, page, run
from lockstep_lab.report.config_difference import differing
from lockstep_lab.report.intervals import EvaluatedRun
from lockstep_lab.report.page import number_text, section, table
from lockstep_lab.report.run import RunSummary

_WIDE = 40  # characters of a value on the terminal
_LONG = 300  # and on the page
_AROUND = 10  # characters that are kept of what long values have in common
_NOT_COMPARED = ("name",)


@dataclass(frozen=True)
class Comparison:
    """The differences between runs. All lists are in the order of the runs."""

    labels: list[str]
    runs: list[RunSummary]
    config: dict[str, list[Any]]
    """The values of each key that differs, by dotted key."""
    results: dict[str, list[float | None]]
    """The last value of each result, by name."""
    best: dict[str, list[float | None]]
    """The best value of the metric that chooses the best checkpoint, under `max eval/accuracy` or the like."""
    evaluated: Sequence[str] = ()
    """What was evaluated again, in lines."""
    judged: Sequence[judgement.Judgement] = ()
    """How each training compares with the first, if they were evaluated again."""


def compare(
    folders: Sequence[Path], out: Path | None = None, *, evaluate: Callable[[Path], EvaluatedRun] | None = None
) -> str:
    """A comparison as text for the terminal. The others are compared with the first run.

    Args:
        out: the HTML page to write; None: none.
        evaluate: evaluates a run again, for intervals of the differences: `left_out.of_run`.

    Raises:
        UsageError: fewer than two folders, or a folder is not a run directory.
        OSError: the page cannot be written.
        LockstepError: a run cannot be evaluated.
    """
    if len(folders) < 2:
        raise UsageError("there is only one run", remedy="give the directories of two runs or more")
    compared = of_runs(folders)
    if evaluate is not None:
        trainings, judged = judgement.judge(compared.labels, compared.runs, evaluate)
        compared = replace(compared, evaluated=judgement.lines(trainings), judged=judged)
    if out is not None:
        atomic.write_text(out, to_html(compared))
    return to_text(compared)


def of_runs(folders: Sequence[Path]) -> Comparison:
    """The differences between the runs in `folders`."""
    runs = [run.read(folder) for folder in folders]
    names = dict.fromkeys(name for one in runs for name in one.metrics.series if _is_result(name))
    config = {
        key: values for key, values in differing([one.config for one in runs]).items() if key not in _NOT_COMPARED
    }
    return Comparison(
        _labels(folders),
        runs,
        config,
        {
            name: [one.metrics.last(name) for one in runs]
            for name in sorted(names, key=lambda name: name[:5] != "eval/")
        },
        _best_results(runs),
    )


def _is_result(name: str) -> bool:
    """True if the last value of a name is informative."""
    if name.endswith("/samples") or name == "train/lr" or name.startswith("train/lr/"):
        return False
    return name.startswith(("eval/", "train/")) or name == "memory/peak_mb"


def _best_results(runs: Sequence[RunSummary]) -> dict[str, list[float | None]]:
    rules = dict.fromkeys(one.retention.best for one in runs if one.retention.best is not None)
    best: dict[str, list[float | None]] = {}
    for kind, name in rules:
        facts = dict(
            charts.Chart(
                "",
                [charts.Line(str(n), s.metrics.series[name]) for n, s in enumerate(runs) if name in s.metrics.series],
            ).facts()
        )
        place = 1 if kind == "min" else 2
        best[f"{kind} {name}"] = [facts[str(n)][place] if str(n) in facts else None for n in range(len(runs))]
    return best


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that distinguish all runs."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(path[-length:]).replace("//", "/") for path in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{number}: {folder.name}" for number, folder in enumerate(folders, 1)]  # a folder was given twice


def _about(one: RunSummary) -> list[str]:
    environment = one.environment
    git = environment.get("git")
    commit = (
        str(git.get("commit") or "")[:10] + " with changes" * bool(git.get("dirty")) if isinstance(git, dict) else ""
    )
    data = next((checkpoint.manifest.get("data") for checkpoint in one.checkpoints), None)
    digest = str(data.get("digest", ""))[:10] if isinstance(data, dict) else ""
    versions = f"{environment.get('lockstep', '-')}, {environment.get('torch', '-')}"
    where = f"{environment.get('world', '-')} x {environment.get('device', '-')}"
    state, _ = one.state()
    return [state, number_text(one.last_step), duration(one.trained_s), where, versions, commit, digest]


_ABOUT = ("state", "last step", "trained for", "ranks x device", "lockstep, torch", "git commit", "data fingerprint")


def _values(values: Sequence[Any], length: int) -> list[str]:
    """The values of a key as texts. Of long texts, the common beginning and end are left out.

    So the difference is shown, such as the end of a path.

    Args:
        length: texts up to this many characters stay whole.
    """
    texts = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str) for value in values
    ]
    given = [text for text, value in zip(texts, values, strict=True) if value is not None]
    longest = max(map(len, given), default=0)
    start = end = 0
    if longest > length and len(given) > 1:
        start = max(0, len(_shared(given)) - _AROUND)
        rests = [text[start:] for text in given]
        end = max(0, len(_shared([rest[::-1] for rest in rests])) - _AROUND)
    shown = []
    for text, value in zip(texts, values, strict=True):
        inner = text[start : len(text) - end]
        part = f"{'…' * (start > 0)}{inner}{'…' * (end > 0)}"
        shown.append("-" if value is None else shortened(part, _LONG))
    return shown


def _shared(texts: Sequence[str]) -> str:
    """The beginning that all texts have in common."""
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _difference(value: float | None, first: float | None) -> str:
    """The value minus the first, and as a fraction of the first."""
    if value is None or first is None:
        return ""
    if value == first:
        return "same"
    share = f", {(value - first) / abs(first):+.1%}" if first else ""
    return f"{value - first:+.4g}{share}"


def _result_rows(compared: Comparison) -> list[list[str]]:
    """For each result its values, and below each value except the first the difference."""
    rows = []
    for name, values in {**compared.best, **compared.results}.items():
        if name.endswith(("/bad", "/skipped")) and not any(values):
            continue
        first, *others = values
        cells = [number_text(first)]
        for value in others:
            difference = _difference(value, first)
            cells.append(number_text(value) + (f" ({difference})" if difference else ""))
        rows.append([name, *cells])
    return rows


# ---- the terminal


def to_text(compared: Comparison) -> str:
    """The comparison as aligned columns."""
    about = [list(row) for row in zip(_ABOUT, *map(_about, compared.runs), strict=True)]
    config = [[key, *_values(values, _WIDE)] for key, values in compared.config.items()]
    blocks = [["runs", _columns(compared.labels, about)]]
    blocks.append(["config", _columns(compared.labels, config) if config else "  no key differs"])
    results = _result_rows(compared)
    blocks.append(["last results", _columns(compared.labels, results) if results else "  none are logged"])
    blocks += [["evaluated again", _judged(compared)]] if compared.judged else []
    problems = [
        f"{label}: {what}" for label, one in zip(compared.labels, compared.runs, strict=True) for what in one.problems
    ]
    blocks += [["left out", "\n".join(f"  {_printable(what)}" for what in problems)]] if problems else []
    return "\n\n".join(f"{title}\n{text}" for title, text in blocks)


def _judged(compared: Comparison) -> str:
    lines = [f"  {_printable(line)}" for line in compared.evaluated]
    for one in compared.judged:
        heads, *rows = [one.heads, *one.rows()]
        lines += ["", _columns(heads[1:], rows), "", *(f"  {line}" for line in one.summary())]
    return "\n".join(lines)


def _columns(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [[_printable(cell) for cell in row] for row in [["", *labels], *rows]]
    wide = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)) for row in shown]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _printable(text: str) -> str:
    """Without line breaks and control characters, which would affect a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


# ---- the page


def to_html(compared: Comparison) -> str:
    """The comparison as a page with overlaid curves."""
    labels, runs = compared.labels, compared.runs
    curves = charts.of_runs({label: one.metrics for label, one in zip(labels, runs, strict=True)})
    plots, values = page.figures(curves)
    about = [[name, *cells] for name, *cells in zip(_ABOUT, *map(_about, runs), strict=True)]
    about += [["folder", *(os.fspath(one.folder.resolve()) for one in runs)]]
    about += (
        [["left out", *("; ".join(one.problems) or "-" for one in runs)]] if any(one.problems for one in runs) else []
    )
    rows = [[key, *_values(found, _LONG)] for key, found in compared.config.items()]
    none = element("p", "No key differs.", class_="soft")
    config = table(("key", *labels), rows, "paths", label="Config") if rows else none
    results = _result_rows(compared)
    said = "The last values, with the difference from the first run in brackets."
    results_part: Sequence[Markup] = [
        element("p", said if results else "Nothing is logged yet.", class_="soft"),
        *([table(("", *labels), results, "numbers", label="Last results")] if results else []),
    ]
    body = [
        element("h1", "Comparison of " + ", ".join(labels)),
        section("Runs", table(("", *labels), about, "paths", label="Runs")),
        section("Config", config),
        section("Results", results_part),
        *([section("Evaluated again", _judged_parts(compared))] if compared.judged else []),
        section("Curves", plots if curves else element("p", "No entry is logged.", class_="soft")),
    ]
    return page.document("lockstep compare: " + ", ".join(labels), body, values)


def _judged_parts(compared: Comparison) -> list[Markup]:
    parts = [element("p", line) for line in compared.evaluated]
    for one in compared.judged:
        parts.append(table(one.heads, one.rows(), "numbers", label=f"{one.other.letter} and {one.first.letter}"))
        parts += [element("p", line.strip()) for line in one.summary()]
    return parts
