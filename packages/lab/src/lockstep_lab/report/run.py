"""Everything that a run directory contains about a run. Whatever is missing or damaged is left out and listed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep import locks
from lockstep.configs import config_layers
from lockstep.core.checkpoint import manifest
from lockstep.core.checkpoint.manifest import Checkpoint
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.errors import UsageError
from lockstep.parts import evaluations_file
from lockstep_lab.report import metrics_file, train_log
from lockstep_lab.report.metrics_file import LoggedMetrics
from lockstep_lab.report.train_log import TrainLog

_OF_A_RUN = ("config.yaml", "environment.json", "metrics.jsonl", "train.log")
_HANGS, _HANG = 5, 40_000  # reports on hangs, and characters of each, that are shown
_LONGEST = 200_000  # characters of a text file that are read


@dataclass
class RunSummary:
    """The facts of a run."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    """The sections of config.yaml, as written."""
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: LoggedMetrics = field(default_factory=LoggedMetrics)
    log: TrainLog = field(default_factory=TrainLog)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """With a valid manifest, newest first."""
    verdict: dict[str, Any] = field(default_factory=dict)
    """The content of verify.json. Empty: nothing was verified."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Results of `lockstep evaluate`, in chronological order: see `parts.evaluations_file`."""
    hangs: list[tuple[str, str]] = field(default_factory=list)
    """Name and text of the hang reports."""
    model: str = ""
    """The content of model.txt."""
    problems: list[str] = field(default_factory=list)
    """Missing and damaged parts of the run, for people."""
    is_running: bool | None = None
    """True if a process trains in the folder. None: unknown, such as for a copy of a run."""

    @property
    def name(self) -> str:
        """`name` of the config, or the name of the folder."""
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def retention(self) -> CheckpointConfig:
        """The checkpoints that the config keeps."""
        try:
            return CheckpointConfig.model_validate(self.section("checkpoint"))
        except ValidationError:  # config.yaml is damaged, or from a different version
            return CheckpointConfig()

    @property
    def best(self) -> Checkpoint | None:
        """The best checkpoint by the metric of `checkpoint.keep_best`."""
        return self.retention.best_of(self.checkpoints)

    @property
    def last_step(self) -> int | None:
        """The last step that is known to be done."""
        steps = [self.metrics.last_step, *(one.step for one in self.checkpoints[:1])]
        steps += [start.reached for start in self.log.starts[-1:]]
        return max((step for step in steps if step is not None), default=None)

    @property
    def trained_s(self) -> float:
        """Seconds of all starts together, up to their last entries in the log. Repeated steps count once."""
        return self.metrics.trained_s([start.from_step for start in self.log.starts[1:]])

    @property
    def evaluation_sets(self) -> list[str]:
        """The names of the evaluation data, if there are several."""
        evaluated = self.section("data").get("eval")
        return list(map(str, evaluated)) if isinstance(evaluated, Mapping) else []

    def results(self) -> list[str]:
        """Names of evaluation results that cover all samples of a set, and not one class."""
        return [name for name in self.metrics.series if is_result(name) and len(self.parts(name)) == 2]

    def parts(self, name: str) -> list[str]:
        """The parts of a name, such as `eval`, `iou`, `Sky`. The name of a set of evaluation data is left out."""
        parts = name.split("/")
        return [parts[0], *parts[2:]] if len(parts) > 2 and parts[1] in self.evaluation_sets else parts

    def section(self, name: str) -> dict[str, Any]:
        """A section of the config; empty if it is not a section."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    def state(self) -> tuple[str, str]:
        """`complete`, `stopped` or `open`, and a sentence about it."""
        starts = self.log.starts
        if not starts:
            return "open", "train.log is missing or contains no start"
        last = starts[-1]
        if last.is_complete:
            return "complete", last.ending or f"complete at step {last.reached}"
        if last.ending:
            return "stopped", last.ending
        goal = f" of {last.goal}" if last.goal else ""
        how = {True: "running", False: "killed or failed", None: "running or killed"}[self.is_running]
        return "open", f"not complete: at step {last.reached}{goal}, {how} (last line: {last.last_at})"


def is_result(name: str) -> bool:
    """True if a name is a result of an evaluation, not a number of samples."""
    return name.startswith("eval/") and name.rpartition("/")[2] not in ("samples", "bad", "of_samples")


def read(folder: Path) -> RunSummary:
    """The facts of the run in `folder`.

    Raises:
        UsageError: the folder does not exist, or contains no file of a run.
    """
    if not any((folder / name).is_file() for name in _OF_A_RUN):
        what = "not a run directory: it has none of " + ", ".join(_OF_A_RUN) if folder.is_dir() else "no such folder"
        raise UsageError(what, where=str(folder), remedy="give the directory of a run, such as runs/digits")
    problems = [f"{name} is missing" for name in _OF_A_RUN if not (folder / name).is_file()]
    run = RunSummary(folder, problems=problems)
    try:
        run.config = config_layers.read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    except UsageError as error:
        problems.append(f"config.yaml: {error.what}")
    except RecursionError:
        problems.append("config.yaml: too deeply nested")
    run.environment = _mapping(folder / "environment.json", problems)
    run.verdict = _mapping(folder / "verify.json", problems)
    run.metrics = metrics_file.read(folder / "metrics.jsonl")
    if run.metrics.damaged:
        lines = "1 line is" if run.metrics.damaged == 1 else f"{run.metrics.damaged} lines are"
        problems.append(f"metrics.jsonl: {lines} damaged or half written, and left out")
    run.evaluations = evaluations_file.read(folder)
    run.log = train_log.read(folder / "train.log")
    run.checkpoints = [one for one in manifest.listed(folder / "checkpoints") if _is_whole(one)]
    problems += [f"checkpoints/{complaint}" for complaint in manifest.unreadable(folder / "checkpoints")]
    reports = sorted(path for path in folder.glob("hang-*.txt") if path.is_file())
    # A rank that is killed leaves an empty file.
    run.hangs = [(path.name, text[:_HANG]) for path in reports if (text := _text(path).strip())][-_HANGS:]
    run.model = _text(folder / "model.txt")
    run.is_running = locks.is_held(folder / ".lock")
    return run


def _is_whole(checkpoint: Checkpoint) -> bool:
    """True if the manifest has the keys that are shown; its checksum only shows that it is unchanged."""
    try:
        return checkpoint.step >= 0 and checkpoint.size >= 0 and isinstance(checkpoint.metrics, dict)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty, with a problem, if the file is damaged. A missing file is fine here."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        problems.append(f"{path.name} cannot be read, or is not JSON")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return content


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except OSError:
        return ""
