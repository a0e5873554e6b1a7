"""Compares two runs: first what they record, then what they compute when both are trained again."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lockstep.core.errors import LockstepError, number_of
from lockstep_lab.bisect import recorded
from lockstep_lab.bisect.recorded import RecordedRun, Suspect
from lockstep_lab.bisect.trace import Difference, Trace, first_difference
from lockstep_lab.bisect.verdict import BisectVerdict, judged

_MODULE = "lockstep_lab.bisect.child"
_FROM_FIGURE = {"train/lr": "settings", "train/loss": "weights", "train/grad_norm": "gradient", "eval/": "results"}
"""By the first figure of the log that differs: the stage that it shows."""
_MEMORY = "a change that no code made, such as a flipped bit in a memory; or code and data outside of the run directory"
_MORE = {"batch": "samples", "loss": "operations", "gradient": "operations", "exchange": "operations"}
"""Stages that details of a step divide further."""


class BisectError(LockstepError):
    """A run cannot be trained again. Exit code 1."""


def bisect(folders: tuple[Path, Path], tell: Callable[[str], None], until: int | None = None) -> BisectVerdict:
    """Name the first difference between two runs.

    Args:
        tell: reports what comes next.
        until: the last step to make again. None: the first that differs in the logs, or else the last.

    Raises:
        LockstepError: a folder is not a run, or a run cannot be trained again.
    """
    one, other = (recorded.read(folder) for folder in folders)
    figure = recorded.first_figure(one.entries, other.entries)
    checkpoint = recorded.first_checkpoint(one, other)
    if figure:
        tell(f"the logs differ first in the entry of steps {figure[0]} to {figure[1]}: {figure[2]}, {figure[3]}")
    else:
        tell("the logs have the same numbers")
    if checkpoint:
        tell(f"the checkpoints of step {checkpoint[0]} differ: {checkpoint[1]}")
    ends = [figure[1]] if figure else [min(_last(run) for run in (one, other))]
    last = until or max(1, min([*ends, *([checkpoint[0]] if checkpoint else [])]))
    start = _start(one, other, figure[0] - 1 if figure else last - 1)
    tell(f"training both again, each in its own process: steps {start + 1} to {last}")
    traces = _trained((one, other), start, last, {start + 1})
    found = first_difference(*traces)
    if found is not None and not found.detailed and found.stage in _MORE:
        tell(f"step {found.step} again, with its {_MORE[found.stage]}")
        traces = _trained((one, other), start, found.step, {found.step})
        found = first_difference(*traces) or found
    for run, ranks in zip((one, other), traces, strict=True):
        for error in {trace.error for trace in ranks if trace.error}:
            tell(f"{run.folder} ended early: {error}")
    suspects = recorded.suspects(one, other, [traces[0][0], traces[1][0]])
    if found is None:
        found, more = _unrepeated((one, other), traces, checkpoint)
        is_memory = any(one.key == "memory" for one in more)  # then what is recorded explains it better
        suspects = [*suspects, *more] if is_memory else more or suspects
    if found is None:
        text = f"No difference in {number_of(last, 'step')}, neither in the logs nor in what the runs compute"
        return BisectVerdict(
            0, "", 0, text, "", [one.text for one in suspects], f"lockstep compare {folders[0]} {folders[1]}"
        )
    return judged(found, suspects, str(folders[1]), start + 1)


def _last(run: RecordedRun) -> int:
    return max((int(entry["step"]) for entry in run.entries), default=1)


def _start(one: RecordedRun, other: RecordedRun, before: int) -> int:
    """The newest step, at most `before`, after which both runs have the same checkpoint. 0: the beginning."""
    mine, yours = one.checkpoints, other.checkpoints
    same = [
        step
        for step in mine.keys() & yours.keys()
        if step <= before and _content(mine[step].manifest) == _content(yours[step].manifest)
    ]
    return max(same, default=0)


def _content(manifest: Mapping[str, object]) -> object:
    files: Mapping[str, object] = manifest["files"]  # type: ignore[assignment]
    return {name: about for name, about in files.items() if name.endswith(".distcp")}


def _trained(
    runs: tuple[RecordedRun, RecordedRun], start: int, until: int, detailed: set[int]
) -> tuple[list[Trace], list[Trace]]:
    """The traces of both runs, by rank."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bisect-") as name:
        folders = [Path(name, str(number)) for number in range(2)]
        ranks = [
            _launched(run, out, _order(run, out, start, until, detailed))
            for run, out in zip(runs, folders, strict=True)
        ]
        codes = [_ended(processes) for processes in ranks]
        one, other = (_read(run, out, code) for run, out, code in zip(runs, folders, codes, strict=True))
        return one, other


def _read(run: RecordedRun, out: Path, code: int) -> list[Trace]:
    """The traces of a run that has ended."""
    files = (out / f"rank{rank}.pickle" for rank in range(run.ranks))
    # Processes of this command have written the files.
    traces: list[Trace] = [pickle.loads(file.read_bytes()) for file in files if file.is_file()]
    if len(traces) == run.ranks and traces[0].steps:
        return traces
    error = next((trace.error for trace in traces if trace.error), "")
    log = (out / "log").read_text(errors="replace").strip()[-2000:]
    raise BisectError(
        f"the run cannot be trained again: {error or f'exit code {code}'}" + ("" if error else f"\n{log}"),
        where=str(run.folder),
        remedy="give its data and libraries back, and call lockstep bisect in the folder where the run was started",
    )


def _order(run: RecordedRun, out: Path, start: int, until: int, detailed: set[int]) -> Path:
    """Prepare the folder in which a run is trained again, from the checkpoint of step `start`."""
    scratch, folder = out / "run", run.folder.resolve()
    scratch.mkdir(parents=True)
    if start:
        for name in ("config.yaml", "environment.json", "micro.json"):
            if (folder / name).is_file():
                shutil.copy(folder / name, scratch)
        place = f"checkpoints/step-{start:08d}"
        (scratch / "checkpoints").mkdir()
        (scratch / place).symlink_to(folder / place, target_is_directory=True)
        if (folder / "task").is_dir():
            shutil.copytree(folder / "task", scratch / "task")
    order = {"run_dir": str(folder), "scratch": str(scratch), "out": str(out), "until": until}
    (out / "order.json").write_text(json.dumps(order | {"detailed": sorted(detailed)}))
    return out / "order.json"


def _launched(run: RecordedRun, out: Path, order: Path) -> list[subprocess.Popen[bytes]]:
    """Train a run again in a new process for each rank: by its interpreter and in its folder, if they are there."""
    about = run.environment
    python, home = about.get("executable") or "", about.get("folder") or ""
    environment = {**os.environ, **about.get("variables", {})}
    if about.get("python_path"):
        environment["PYTHONPATH"] = about["python_path"]
    processes = []
    for rank in range(run.ranks):
        if run.ranks > 1:
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"LOCKSTEP_STORE": str(out / "store")}
            environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(run.ranks))
        with (out / "log").open("ab") as log:
            process = subprocess.Popen(
                [python if Path(python).is_file() else sys.executable, "-m", _MODULE, str(order)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=home if home and Path(home).is_dir() else None,  # the empty path is a folder, too
            )
        processes.append(process)
    return processes


def _ended(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the ranks of a run. If one fails, the others are ended. Returns the first exit code that is not 0."""
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
    return next((code for process in processes if (code := process.wait())), 0)


def _unrepeated(
    runs: tuple[RecordedRun, RecordedRun], traces: tuple[list[Trace], list[Trace]], checkpoint: tuple[int, str] | None
) -> tuple[Difference | None, list[Suspect]]:
    """The first difference of runs that compute the same now, although their records differ. And its causes."""
    for run, ranks in zip(runs, traces, strict=True):
        again = recorded.first_figure(run.entries, ranks[0].entries)
        if again is None:
            continue
        begin, step, name, values = again
        what = f"{run.folder} does not compute its own log again: {name} was {values.replace('against', 'and is')}"
        files = {key: file for trace in ranks for one in trace.steps for key, file in one.names.items()}
        if changed := recorded.changed_files(run, files):
            text = f"changed after {run.folder} began: {'; '.join(changed[:3])}"
            return Difference(begin, "bytes", 0, what, changed[0]), [Suspect("data", text)]
        then, now = run.environment.get("libraries", {}), ranks[0].libraries
        versions = [
            f"{one} {then[one]} then, {now[one]} now" for one in then.keys() & now.keys() if then[one] != now[one]
        ]
        causes = [Suspect("library", one) for one in versions]
        stage = next(stage for figure, stage in _FROM_FIGURE.items() if name.startswith(figure))
        if checkpoint is not None and checkpoint[0] < step + (stage == "results") and not causes:
            stage, step, what = "weights", checkpoint[0] + 1, f"{checkpoint[1]}; {what}"
        return Difference(step, stage, 0, what), causes or [Suspect("memory", _MEMORY)]
    if checkpoint is not None:
        return Difference(checkpoint[0] + 1, "weights", 0, checkpoint[1]), [Suspect("memory", _MEMORY)]
    return None, []
