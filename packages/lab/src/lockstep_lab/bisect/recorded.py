"""What two run directories record, and how it differs: config, code, versions, logs, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.configs import config_file
from lockstep.core import run_folder
from lockstep.core.checkpoint import files, manifest
from lockstep.core.errors import UsageError, number_of
from lockstep.trainer import source_code
from lockstep_lab.bisect.trace import Trace
from lockstep_lab.report.config_difference import differing

_FIGURES = ("train/lr", "train/loss", "train/grad_norm", "eval/")
"""Of an entry of the log, in the order of a step."""
_IGNORED = ("name", "log.", "checkpoint.", "data.workers", "data.prefetch", "data.start_method", "watch.")


@dataclass(frozen=True)
class Suspect:
    """A recorded difference, which may be the cause of others."""

    key: str
    """A key of the config, or `source`, `library`, `ranks`, `device`, `data`, `variable`."""
    text: str


@dataclass
class RecordedRun:
    """What a run directory records."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    source: dict[str, str]
    entries: list[dict[str, float]] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Number of ranks that trained."""
        return int(self.environment.get("world", 1))

    @property
    def checkpoints(self) -> dict[int, manifest.Checkpoint]:
        """By step."""
        return {one.step: one for one in manifest.listed(self.folder / "checkpoints")}


def read(folder: Path) -> RecordedRun:
    """Raises UsageError if the folder is not a run directory, or is that of a Loop."""
    config = config_file.read_run(folder)
    if not config.task.get("kind"):
        what = "the run of a lockstep.Loop, or of a Task object, cannot be trained again from its directory"
        raise UsageError(what, where=str(folder), remedy="lockstep compare shows what differs in configs and results")
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return RecordedRun(
        folder,
        config.model_dump(by_alias=True),
        run_folder.recorded(folder),
        source_code.read(folder / "source"),
        [json.loads(line) for line in lines if line.endswith("}")],
    )


def suspects(one: RecordedRun, other: RecordedRun, traces: Sequence[Trace]) -> list[Suspect]:
    """All recorded differences that may change numbers.

    Args:
        traces: of both runs, made here.
    """
    found = [
        Suspect(key, f"{key}: {values[0]} against {values[1]}")
        for key, values in differing([one.config, other.config]).items()
        if not key.startswith(_IGNORED) and not (key == "task.kind" and one.source and other.source)
    ]
    if change := source_code.difference(one.source, other.source):
        found.append(Suspect("source", f"the code of the task: {change}"))
    for mine, yours in (
        (_versions(one.environment), _versions(other.environment)),
        (traces[0].libraries, traces[1].libraries),
    ):
        changed = [name for name in sorted(mine.keys() & yours.keys()) if mine[name] != yours[name]]
        found += [Suspect("library", f"{name} {mine[name]} against {yours[name]}") for name in changed]
    for key, name, words in (("ranks", "world", "ranks"), ("device", "kind", "device"), ("variable", "variables", "")):
        pair = [run.environment.get(name) for run in (one, other)]
        if pair[0] != pair[1]:
            found.append(Suspect(key, f"{words or name}: {pair[0]} against {pair[1]}"))
    prints = [_fingerprint(run) for run in (one, other)]
    if None not in prints and prints[0] != prints[1]:
        found.append(Suspect("data", "the training data, whose first, middle and last samples differ"))
    return list(dict.fromkeys(found))


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    names = ("lockstep", "torch", "python")
    libraries: dict[str, str] = environment.get("libraries", {})
    return {name: environment[name] for name in names if name in environment} | libraries


def _fingerprint(run: RecordedRun) -> Any:
    return next((one.manifest.get("data") for one in run.checkpoints.values()), None)


def first_figure(
    one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> tuple[int, int, str, str] | None:
    """The first entry of two logs that differs: the steps that it covers, the figure, and both values."""
    by_step = [_by_step(entries) for entries in (one, other)]
    before = 0
    for step in sorted(by_step[0].keys() & by_step[1].keys()):
        mine, yours = by_step[0][step], by_step[1][step]
        for figure in _FIGURES:
            for name in sorted(mine.keys() & yours.keys()):
                if name.startswith(figure) and not name.endswith("_s") and mine[name] != yours[name]:
                    return before + 1, step, name, f"{mine[name]!r} against {yours[name]!r}"
        before = step if "train/loss" in mine else before
    return None


def _by_step(entries: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for entry in entries:
        place = found.setdefault(int(entry["step"]), {})
        place.update(entry)
    return found


def first_checkpoint(one: RecordedRun, other: RecordedRun) -> tuple[int, str] | None:
    """The first step whose checkpoints differ, and how. None: no checkpoint differs."""
    mine, yours = one.checkpoints, other.checkpoints
    for step in sorted(mine.keys() & yours.keys()):
        if what := _tensors(mine[step], yours[step]):
            return step, what
    return None


def _tensors(one: manifest.Checkpoint, other: manifest.Checkpoint) -> str:
    tensors = [dict(files.read(c.path, c.index, dict.fromkeys(c.index), None)) for c in (one, other)]
    names = [name for name in tensors[0] if name in tensors[1] and not _equal(tensors[0][name], tensors[1][name])]
    if not names:
        return ""
    name = names[0]
    pair = [found[name].contiguous().reshape(-1).view(torch.uint8) for found in tensors]
    if pair[0].shape != pair[1].shape:
        return f"{name} has a different shape or dtype"
    changed = torch.bitwise_xor(*pair)
    bits = sum(int(number).bit_count() for number in changed[changed != 0][:64])
    size = tensors[0][name].element_size()
    elements = int((changed.view(-1, size) != 0).any(1).sum())
    text = f"{name}, in {number_of(elements, 'element')}" + (f" by {number_of(bits, 'bit')}" if elements == 1 else "")
    return text if len(names) == 1 else f"{text}, and {len(names) - 1} more of {len(tensors[0])} tensors"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def changed_files(run: RecordedRun, names: Mapping[Any, str]) -> list[str]:
    """The files of the data that were changed after the run began: those of samples, and the config's own.

    Args:
        names: of samples, which may be files, by (epoch, index).
    """
    marker = run.folder / "config.yaml"
    began = marker.stat().st_mtime if marker.is_file() else 0.0
    home = Path(run.environment.get("folder") or ".")
    found = [(f"sample {key[1]} ({name})", home / name) for key, name in names.items()]
    data = run.config["data"]
    for key in ("train", "eval"):
        if isinstance(data.get(key), str):
            path = home / data[key]
            found += [(f"data.{key} ({one})", one) for one in ([path] if path.is_file() else path.glob("*.*"))]
    return [what for what, path in found if path.is_file() and path.stat().st_mtime > began]
