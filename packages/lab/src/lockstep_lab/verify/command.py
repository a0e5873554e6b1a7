"""`lockstep verify`: run the checks one after the other, and write their results."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.core import atomic, devices
from lockstep.core.errors import LockstepError, UsageError, did_you_mean, number_of
from lockstep_lab.verify import html_report, next_step, report, worker_functions
from lockstep_lab.verify.checks import CHECKS, DEFAULT
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.result import CheckResult, VerifyResult, fault, not_shown
from lockstep_lab.verify.workers import Workers

LOG = "verify.log"
MARKS = {"verify.json": '{\n "schema": ', "verify.html": ": lockstep verify</title>"}
"""The files that a verification writes, each with a part of all of them."""
_FEWEST_STEPS = 4


def verify(
    config: Mapping[str, Any],
    nproc: int,
    run_dir: Path,
    *,
    checks: Sequence[str] = (),
    quick: bool = False,
    steps: int | None = None,
    tell: Callable[[str], None] = print,
    wrap: Callable[..., Any] = worker_functions.answering,
    workers: Workers | None = None,
) -> VerifyResult:
    """Check the training that `config` describes, and write `verify.json` and `verify.html` into `run_dir`.

    Args:
        config: as `RunConfig` writes it, with a number as its global batch.
        nproc: number of ranks.
        checks: names of checks; empty: `DEFAULT`.
        quick: shorter trainings.
        steps: of each training that is compared with another; None: 12, or 8 with `quick`.
        tell: receives a line of text for each check.
        wrap: for tests: calls the function on a rank.
        workers: for tests: workers that are already running.

    Raises:
        UsageError: an unknown check, a folder that cannot be written, a config that does not fit the model, fewer GPUs
            than ranks.
        LockstepError: the task does not run, or the results cannot be written.
    """
    _check_arguments(checks, steps)
    if config["device"] == "mps":
        raise UsageError(
            "verify trains in float64 and on several ranks; mps supports neither",
            where="device=mps",
            remedy="use device=cpu: the checks test the training, not the device",
        )
    config = _with_one_evaluation_set(_on_device_for(config, nproc, tell), tell)
    versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    result = VerifyResult(str(config["name"]), nproc, "cpu", quick, dict(config), versions)
    start = time.perf_counter()
    folder = make_folder(run_dir)
    own_workers = Workers(run_dir / LOG) if workers is None else workers
    try:
        experiments = ExperimentRunner(
            config,
            nproc,
            folder,
            own_workers,
            steps=steps or (8 if quick else 12),
            learning_steps=40 if quick else 60,
            wrap=wrap,
        )
        _check_that_task_runs(experiments, run_dir)
        if config["device"] != "cpu" and devices.gpus():
            (result.device,) = experiments.run("device", 1, worker_functions.device_name, config["device"])
        tell(report.HEAD)
        for name in checks or DEFAULT:
            _announce(name)
            check = _make_check(name, experiments)
            check = next_step.finished(check, result.checks, next_step.target(config), str(run_dir / LOG))
            result.checks.append(check)
            tell(report.line(check))
        result.seconds = round(time.perf_counter() - start, 1)
        write(result, run_dir)
    finally:
        if workers is None:
            own_workers.close()
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _check_arguments(checks: Sequence[str], steps: int | None) -> None:
    """Raises UsageError if there is no such check, or the steps are too few to check anything."""
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        remedy = f"{did_you_mean(unknown[0], CHECKS)}There are: {', '.join(CHECKS)}"
        raise UsageError(f"there is no check {unknown[0]!r}", where="--checks", remedy=remedy)
    if steps is not None and steps < _FEWEST_STEPS:
        raise UsageError(
            f"{number_of(steps, 'step', 'is', 'are')} too few", where="--steps", remedy=f"give {_FEWEST_STEPS} or more"
        )


def make_folder(run_dir: Path) -> Path:
    """A new folder in `run_dir`, in which experiments write."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="verify-", dir=run_dir))
    except OSError as error:
        raise _cannot_write(UsageError, error, run_dir, remedy="choose a different folder with --run-dir") from error


def write(result: VerifyResult, run_dir: Path) -> None:
    try:
        atomic.write_text(run_dir / "verify.json", json.dumps(report.to_json(result), indent=1, allow_nan=False))
        atomic.write_text(run_dir / "verify.html", html_report.to_html(result))
    except OSError as error:
        raise _cannot_write(LockstepError, error, run_dir, remedy="free disk space, or give --run-dir") from error


def _cannot_write(kind: type[LockstepError], error: OSError, run_dir: Path, *, remedy: str) -> LockstepError:
    return kind(f"cannot write: {error.strerror}", where=str(error.filename or run_dir), remedy=remedy)


def _check_that_task_runs(experiments: ExperimentRunner, run_dir: Path) -> None:
    """Run the task and its model once, so that errors in them are reported before any check."""
    try:
        experiments.probe()
        experiments.cut()
    except ExperimentFailed as failed:
        if failed.refused:
            raise UsageError(failed.error) from None
        if failed.known:
            raise LockstepError(failed.error) from None
        raise LockstepError(
            f"the task does not run: {failed.error}",
            where=str(run_dir / LOG),
            remedy="fix it; that file has the traceback",
        ) from None


def _make_check(name: str, experiments: ExperimentRunner) -> CheckResult:
    start = time.perf_counter()
    try:
        check = CHECKS[name](experiments)
    except ExperimentFailed as failed:
        check = not_shown(failed.error) if failed.refused else fault(_failure(failed, experiments))
        check.cause = failed.error.rpartition(" failed: ")[2]
    except LockstepError as error:  # for example a checkpoint that cannot be read
        check = fault(str(error))
    check.name = name
    check.seconds = round(time.perf_counter() - start, 2)
    return check


def _failure(failed: ExperimentFailed, experiments: ExperimentRunner) -> str:
    """Words for a failed experiment, with a likely cause."""
    words = f"the experiment failed: {failed}"
    collectives = experiments.probe().collectives
    if not collectives or failed.known:
        return words
    return (
        f"{words}. Task.loss makes collectives ({', '.join(collectives[:3])}): all ranks must make them "
        "equally often, also in evaluations, with tensors of equal shape, also for the last samples of an epoch"
    )


def _announce(name: str) -> None:
    """Print the name of the check that begins, on a terminal. The line with its result replaces it."""
    if sys.stdout.isatty():
        print(f"{name} ...", end="\r", flush=True)


def _on_device_for(config: Mapping[str, Any], nproc: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """`config` with a device on which `nproc` ranks can compute.

    Most checks compare ranks. So `auto` means the CPU if there are fewer GPUs than ranks. This process only counts the
    GPUs: it initializes none, which would take its memory.

    Raises:
        UsageError: device=cuda, and fewer GPUs than ranks.
    """
    if devices.rather_than_mps(config["device"]) != config["device"]:
        tell("note: the checks need float64 and several ranks, which mps lacks, so they run on the CPU")
        return {**config, "device": "cpu"}
    gpus = devices.gpus() if config["device"] in ("auto", "cuda") else 0
    if not 0 < gpus < nproc:
        return dict(config)
    counted = f"{number_of(gpus, 'GPU')} for {nproc} ranks"
    if config["device"] == "cuda":
        raise UsageError(
            f"this machine has {counted}",
            where="device=cuda",
            remedy=f"use device=cpu, which shows the same about the training, or --nproc {gpus}"
            + (" for the checks that a single rank can show" if gpus == 1 else ""),
        )
    tell(f"note: {counted}, so the checks run on the CPU; --nproc {number_of(gpus, 'runs them on the GPU')}")
    return {**config, "device": "cpu"}


def _with_one_evaluation_set(config: Mapping[str, Any], tell: Callable[[str], None]) -> Mapping[str, Any]:
    """`config` with the first of several sets of evaluation data."""
    sets = config["data"]["eval"]
    if not isinstance(sets, Mapping):
        return config
    name, source = next(iter(sets.items()))
    tell(f"note: uses {name}, the first of {len(sets)} sets of evaluation data")
    return {**config, "data": {**config["data"], "eval": source}}
