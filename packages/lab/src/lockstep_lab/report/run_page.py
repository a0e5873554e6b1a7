"""The page of one run."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import lockstep
from lockstep.core import atomic
from lockstep.drawing.markup import Markup, element, shortened
from lockstep.parts.ending import duration
from lockstep_lab.report import charts, commands, evaluations, page, run, timeline
from lockstep_lab.report.config_difference import flat
from lockstep_lab.report.page import code, facts, folded, folded_section, number_text, section, table
from lockstep_lab.report.run import RunSummary, is_result

_SHOWN = 200  # characters of a value
_LONG = 50_000  # of a text
_BYTES = 4_700_000  # of the page
_TEXTS = 900_000  # of these, for everything except curves and images
_KEYS = 20  # that differ: the most that are named
_HYPERPARAMETERS = {
    "task": "task.kind",
    "optimizer": "optim.name",
    "learning rate": "optim.lr",
    "weight decay": "optim.weight_decay",
    "schedule": "schedule.name",
    "warm-up steps": "schedule.warmup_steps",
    "clip norm": "optim.clip_norm",
    "global batch": "batch.global",
    "precision": "precision",
    "strategy": "parallel.strategy",
    "seed": "seed",
}
_LENGTHS = {"train.steps": "steps", "train.epochs": "epochs"}


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the run in `folder`, and return its path.

    Args:
        out: None: report.html in the folder.

    Raises:
        UsageError: `folder` is not a run directory.
        OSError: the page cannot be written.
    """
    out = out or folder / "report.html"
    atomic.write_text(out, to_html(run.read(folder)))
    return out


def to_html(shown: RunSummary) -> str:
    """The page as text."""
    curves = charts.of_run(shown.metrics, shown.evaluation_sets)
    count = charts.first(curves) if curves else 0
    plots, values = page.figures(curves[:count])
    more, more_values = page.figures(curves[count:], count)
    values += more_values
    # In base64, 3 bytes become 4.
    room = max(0, _BYTES - _TEXTS - len(json.dumps(values))) * 3 // 4
    hint = "Drag across a chart to zoom in, double-click to zoom out; click on a name to hide its line."
    marks = [start.from_step for start in shown.log.starts[1:]] or [after for _, after in shown.metrics.restarts()]
    restarts = " Dashed vertical lines mark restarts." if marks else ""
    parts = [
        ("Result", _result(shown)),
        ("Hyperparameters", _hyperparameters(shown)),
        (
            "Curves",
            [
                element("p", hint + restarts, class_="soft"),
                plots,
                *([folded(f"{len(more_values)} more charts", more)] if more_values else []),
            ]
            if curves
            else [_nothing("no entry is logged")],
        ),
        ("Evaluations", evaluations.parts(shown, room=room)),
    ]
    rest = [
        ("Training", _trained(shown)),
        ("Checkpoints", _checkpoints(shown)),
        ("Time line", timeline.parts(shown)),
        ("Verification", _verification(shown)),
        ("Repeat", commands.parts(shown)),
        ("Config and model", _config(shown)),
    ]
    links = [element("a", title, href="#" + title.lower().replace(" ", "-")) for title, _ in parts + rest]
    body = [*_header(shown), element("nav", links, aria_label="Parts of this page")]
    body += [section(title, content) for title, content in parts]
    body += [folded_section(title, content) for title, content in rest]
    return page.document(f"{shown.name}: lockstep report", body, values, marks)


def _header(shown: RunSummary) -> list[Markup]:
    state, sentence = shown.state()
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    about = f"{shown.folder.resolve()} · page made {now} by lockstep {lockstep.__version__}"
    problems = [element("p", "Left out: " + "; ".join(shown.problems), class_="soft")] if shown.problems else []
    return [
        element("h1", shown.name),
        element(
            "p",
            sentence if sentence.startswith("train.log") else sentence[:1].upper() + sentence[1:],
            class_=f"state {state}",
        ),
        element("p", about, class_="soft"),
        *problems,
    ]


def _nothing(text: str) -> Markup:
    return element("p", text[:1].upper() + text[1:] + ".", class_="soft")


def _result(shown: RunSummary) -> list[Markup]:
    metrics = shown.metrics
    names = ["train/loss", *shown.results()]
    pairs = [(name, number_text(value)) for name in names[:12] if (value := metrics.last(name)) is not None]
    best = shown.best
    content = [facts([("last step", number_text(shown.last_step)), *((f"last {name}", text) for name, text in pairs)])]
    if best is not None and shown.retention.best is not None:
        kind, metric = shown.retention.best
        text = f"Best checkpoint: step {best.step:,}, {kind} {metric} {number_text(best.metrics[metric])}"
        content.append(element("p", element("span", text, class_="best")))
    verdict, state = _verdict(shown.verdict)
    return [*content, element("p", "verify: ", element("a", verdict, href="#verification"), class_=state)]


def _hyperparameters(shown: RunSummary) -> list[Markup]:
    """What a reader needs to know of the config. All keys are at the end of the page."""
    values = flat(shown.config)
    length = [f"{values[key]} {name}" for key, name in _LENGTHS.items() if values.get(key)]
    pairs = [(name, _value(values.get(key))) for name, key in _HYPERPARAMETERS.items()]
    model = next((line for line in shown.log.intro if line.endswith(" parameters")), "")
    return [facts([*pairs[:1], ("model", model), *pairs[1:], ("length", " or ".join(length))])]


def _value(value: Any) -> str:
    return "" if value is None or value == [] else shortened(str(value), _SHOWN)


def _trained(shown: RunSummary) -> list[Markup]:
    environment = shown.environment
    starts = shown.log.starts
    git = environment.get("git")
    commit = (
        str(git.get("commit")) + " with changes" * bool(git.get("dirty")) if isinstance(git, Mapping) else "not known"
    )
    source = next((one.manifest.get("data") for one in shown.checkpoints), None)
    source = source if isinstance(source, Mapping) else {}
    samples, digest = source.get("samples"), str(source.get("digest", ""))
    versions = [f"{name} {environment[name]}" for name in ("lockstep", "torch", "python") if environment.get(name)]
    world = environment.get("world", starts[-1].world if starts else None)
    devices = f"{world} x {environment.get('device', '?')}" if world is not None else ""
    devices += f" ({starts[-1].device})" if starts else ""
    known = shown.section("data")
    content = facts(
        [
            ("training data", shortened(str(known.get("train") or ""), _SHOWN)),
            ("evaluation data", shortened(str(known.get("eval") or ""), _SHOWN)),
            ("training samples", number_text(samples) if isinstance(samples, int) else ""),
            ("data fingerprint", shortened(digest, 17)),
            ("trained for", duration(shown.trained_s)),
            ("ranks x device", devices),
            ("host", str(environment.get("host", ""))),
            ("versions", ", ".join(versions)),
            ("git commit", commit),
            ("digest of the task's code", shortened(str(environment.get("task") or ""), 17)),
        ]
    )
    intro = "\n".join(shown.log.intro)[:_LONG]
    return [content, *([folded("the log before the first step", code(intro))] if intro else [])]


def _checkpoints(shown: RunSummary) -> list[Markup]:
    if not shown.checkpoints:
        return [_nothing("there are no checkpoints")]
    retention, best = shown.retention, shown.best
    reasons = retention.reasons(shown.checkpoints)
    names = [retention.best[1]] if retention.best else []
    names += [name for one in shown.checkpoints for name in one.metrics if len(shown.parts(name)) == 2]
    names = [name for name in dict.fromkeys(names) if is_result(name)][:6]
    rows = []
    for one in shown.checkpoints:
        kept = ", ".join(reasons.get(one.step, ["not kept by the config"]))
        why: str | Markup = kept
        if best is not None and one.step == best.step and retention.best is not None:
            why = element("span", f"best: {' '.join(retention.best)}; kept: {kept}", class_="best")
        values = [number_text(one.metrics.get(name)) for name in names]
        saved = page.time(str(one.manifest.get("saved_at", "")))
        rows.append([f"{one.step:,}", why, *values, f"{one.size / 2**20:,.1f} MiB", saved])
    said = "The best is marked: the latest checkpoint with the best value."
    if retention.best is None:
        said = "The config does not define the best checkpoint (checkpoint.keep_best), so the newest is used."
    elif best is None:
        said = f"No checkpoint has {retention.best[1]} yet, so there is no best one."
    about = element("p", said, class_="soft")
    return [about, table(("step", "why it is kept", *names, "size", "saved"), rows, label="Checkpoints")]


def _verdict(verdict: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict in words, and its style."""
    number = verdict.get("counts")
    if not isinstance(number, Mapping) or not isinstance(verdict.get("checks"), list):
        return "not verified", "not-shown"
    text = f"{number.get('passed', 0)} of {len(verdict['checks'])} checks passed"
    if number.get("fault"):
        return f"{text}, {number['fault']} found a fault", "fault"
    shown = f", {number['not shown']} could not be decided" if number.get("not shown") else ""
    return text + shown, "passed" if number.get("passed") else "not-shown"


def _verification(shown: RunSummary) -> list[Markup]:
    text, state = _verdict(shown.verdict)
    how = commands.to_verify(shown)
    if text == "not verified":
        return [element("p", "This run has not been verified. To verify it:"), page.command(how)]
    checks = [check for check in shown.verdict["checks"] if isinstance(check, Mapping)]
    rows = []
    for check in checks[:100]:
        status = str(check.get("status", ""))
        value, bound = check.get("value"), check.get("bound")
        numbers = number_text(value) + (f" (at most {number_text(bound)})" if bound is not None else "")
        style = {"passed": "passed", "fault": "fault"}.get(status, "not-shown")
        reason = shortened(str(check.get("reason", "")), 500)
        rows.append([str(check.get("name", "")), element("span", status, class_=style), numbers, reason])
    about = f"{shown.verdict.get('nproc', '?')} ranks on {shown.verdict.get('device', '?')}"
    about += ", quick" if shown.verdict.get("quick") else ""
    there, here = flat(shown.verdict.get("config") or {}), flat(shown.config)
    other = sorted(key for key in here.keys() & there.keys() if here[key] != there[key])
    notes = []
    if other:
        more = ", ..." if len(other) > _KEYS else ""
        said = f"The verified config differs from the run's in: {', '.join(other[:_KEYS])}{more}."
        notes.append(element("p", said, class_="open"))
    return [
        element("p", text, class_=f"state {state}"),
        element("p", f"{about}; verify.html has the details.", class_="soft"),
        *notes,
        table(("check", "status", "value", "reason"), rows, label="Checks"),
        folded("verify again", page.command(how)),
    ]


def _config(shown: RunSummary) -> list[Markup]:
    parts: list[Markup] = []
    if shown.config:
        parts.append(
            folded(
                "all keys of the config",
                code(yaml.safe_dump(dict(shown.config), sort_keys=False, allow_unicode=True)[:_LONG]),
            )
        )
    if shown.model:
        parts.append(folded("layers of the model", code(shown.model[:_LONG])))
    return parts or [_nothing("config.yaml and model.txt are missing")]
