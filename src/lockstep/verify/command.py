"""`lockstep verify`: make the checks, one after the other, and write down what they found."""

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
from lockstep import atomic
from lockstep.errors import LockstepError, UsageError, did_you_mean
from lockstep.verify import report, trial
from lockstep.verify.bench import Bench, TrialFailed
from lockstep.verify.checks import CHECKS
from lockstep.verify.ranks import Ranks
from lockstep.verify.verdict import Result, Verdict, fault, not_shown

_LOG = "verify.log"


def verify(
    config: Mapping[str, Any],
    nproc: int,
    run_dir: Path,
    checks: Sequence[str] = (),
    quick: bool = False,
    steps: int | None = None,
    tell: Callable[[str], None] = print,
    wrap: Callable[..., Any] = trial.answering,
    ranks: Ranks | None = None,
) -> Result:
    """Check the training that `config` describes, and write `verify.json` and `verify.html` into `run_dir`.

    Args:
        config: as `RunConfig` writes it, its global batch a number.
        nproc: ranks.
        checks: names; none: all.
        quick: shorter trials.
        steps: of each comparison; None: 12, or 8 with `quick`.
        tell: is given the lines for people.
        wrap, ranks: for tests: what calls a trial's function on a rank, and ranks that are warm already.

    Raises:
        UsageError: an unknown check, a folder that cannot be written, a config that does not fit the model.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        hint = did_you_mean(unknown[0], CHECKS)
        raise UsageError(
            f"there is no check {unknown[0]!r}", where="--checks", remedy=f"{hint}There are: {', '.join(CHECKS)}"
        )
    if steps is not None and steps < 4:
        raise UsageError(f"{steps} steps are too few", where="--steps", remedy="give 4 or more")
    versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    result = Result(str(config["name"]), nproc, _device(config), quick, dict(config), versions)
    begun = time.perf_counter()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="verify-", dir=run_dir))
    except OSError as error:
        raise UsageError(
            f"cannot write: {error.strerror}",
            where=str(error.filename or run_dir),
            remedy="choose another place with --run-dir",
        ) from error
    own = Ranks(run_dir / _LOG) if ranks is None else ranks
    try:
        bench = Bench(config, nproc, folder, own, steps or (8 if quick else 12), 40 if quick else 60, wrap=wrap)
        _look(bench, run_dir)
        for name in checks or CHECKS:
            _announce(name)
            verdict = _judge(name, bench)
            result.verdicts.append(verdict)
            tell(report.line(verdict))
        result.seconds = round(time.perf_counter() - begun, 1)
        _write(result, run_dir)
    finally:
        if ranks is None:
            own.close()
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _write(result: Result, run_dir: Path) -> None:
    try:
        atomic.write_text(run_dir / "verify.json", json.dumps(report.to_json(result), indent=1, allow_nan=False))
        atomic.write_text(run_dir / "verify.html", report.to_html(result))
    except OSError as error:
        raise LockstepError(
            f"cannot write: {error.strerror}",
            where=str(error.filename or run_dir),
            remedy="free disk space, or give --run-dir",
        ) from error


def _look(bench: Bench, run_dir: Path) -> None:
    """Make the task and the model once, so that what is wrong with them is said before anything is judged."""
    try:
        _ = bench.nature
    except TrialFailed as failed:
        if failed.refused:
            raise UsageError(failed.error) from None
        if failed.known:
            raise LockstepError(failed.error) from None
        raise LockstepError(
            f"the task does not run: {failed.error}",
            where=str(run_dir / _LOG),
            remedy="repair it; that file has its traceback",
        ) from None


def _judge(name: str, bench: Bench) -> Verdict:
    begun = time.perf_counter()
    try:
        verdict = CHECKS[name](bench)
    except TrialFailed as failed:
        verdict = not_shown(failed.error) if failed.refused else fault(f"the trial failed: {failed}")
    except LockstepError as error:  # what a trial left cannot be read
        verdict = fault(str(error))
    verdict.name = name
    verdict.seconds = round(time.perf_counter() - begun, 2)
    return verdict


def _announce(name: str) -> None:
    """What is being done, on a terminal; the check's line then takes its place."""
    if sys.stdout.isatty():
        print(f"{name} ...", end="\r", flush=True)


def _device(config: Mapping[str, Any]) -> str:
    if config["device"] == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0)
