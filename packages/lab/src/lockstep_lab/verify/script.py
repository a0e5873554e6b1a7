"""`lockstep verify script.py`: run a script with a `Loop` in several ways, and compare steps and final weights."""

from __future__ import annotations

import platform
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.core import devices
from lockstep.core.errors import LockstepError, UsageError, did_you_mean, number_of
from lockstep_lab.verify import command, compare, next_step, report, script_compare
from lockstep_lab.verify.experiments import ExperimentFailed, values_of
from lockstep_lab.verify.result import CheckResult, VerifyResult, fault, not_shown, passed
from lockstep_lab.verify.script_causes import causes_in
from lockstep_lab.verify.script_compare import Made
from lockstep_lab.verify.script_trial import ScriptRun, run_script
from lockstep_lab.verify.worker_functions import answering
from lockstep_lab.verify.workers import WorkerEnded, Workers

STEPS = 20
_FEWEST_STEPS = 4
_ONE_RANK = "one rank cannot be compared with others: give --nproc 2"


def verify_script(
    script: str,
    arguments: Sequence[str],
    nproc: int,
    run_dir: Path,
    *,
    checks: Sequence[str] = (),
    steps: int = STEPS,
    tell: Callable[[str], None] = print,
    workers: Workers | None = None,
) -> VerifyResult:
    """Check a script with a `Loop`, and write `verify.json`, `verify.html` and `verify.log` into `run_dir`.

    Args:
        arguments: of the script.
        checks: names of checks in addition to `determinism`, which comes first; empty: all.
        steps: the step after which runs end.
        tell: receives a line of text for each check.
        workers: for tests: use the same processes for all runs.

    Raises:
        UsageError: an unknown check, too few steps, a script without a `Loop`, a folder that cannot be written.
        LockstepError: the script does not run.
    """
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        remedy = f"{did_you_mean(unknown[0], CHECKS)}For a script there are: {', '.join(CHECKS)}"
        raise UsageError(f"there is no check {unknown[0]!r}", where="--checks", remedy=remedy)
    if steps < _FEWEST_STEPS:
        raise UsageError(
            f"{number_of(steps, 'step', 'is', 'are')} too few", where="--steps", remedy=f"give {_FEWEST_STEPS} or more"
        )
    start = time.perf_counter()
    folder = command.make_folder(run_dir)
    try:
        runs = ScriptRuns(script, tuple(arguments), nproc, folder=folder, log=run_dir / command.LOG, steps=steps)
        runs.workers = workers
        first = runs.plain()
        versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
        about = {"script": script, "arguments": list(arguments), "steps": len(first.first.losses)}
        result = VerifyResult(Path(script).name, nproc, first.first.device, False, about, versions)
        tell(report.HEAD)
        for name in dict.fromkeys(["determinism", *(checks or CHECKS)]):
            check = _make(name, runs)
            check = next_step.finished(check, result.checks, script, str(run_dir / command.LOG))
            result.checks.append(check)
            tell(report.line(check))
            if name == "determinism" and check.status == "fault":
                tell("the other checks need a script whose runs repeat exactly, so they are skipped")
                break
        result.seconds = round(time.perf_counter() - start, 1)
        command.write(result, run_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _make(name: str, runs: ScriptRuns) -> CheckResult:
    start = time.perf_counter()
    try:
        check = CHECKS[name](runs)
    except ExperimentFailed as failed:
        text = f"{failed} (see {runs.log})"
        check = (
            not_shown(text)
            if failed.refused and not failed.has_different_data
            else fault(f"the script fails in this way of running: {text}")
        )
    check.name, check.seconds = name, round(time.perf_counter() - start, 2)
    return check


class ScriptRuns:
    """The runs of the script, each made on first use, in its own processes.

    Args:
        folder: for the run directories.
        log: for everything that the script prints.
    """

    def __init__(
        self, script: str, arguments: tuple[str, ...], nproc: int, *, folder: Path, log: Path, steps: int
    ) -> None:
        self.nproc, self.folder, self.log = nproc, folder, log
        gpus = devices.gpus()
        device = "cpu" if gpus < nproc or devices.rather_than_mps("auto") != "auto" else None
        self.asked = ScriptRun(script, arguments, "", steps, device=device)
        self.causes = causes_in(script)
        self.workers: Workers | None = None
        """None: new processes for each run, because a script may change modules that it imports."""
        self._made: dict[str, Made] = {}

    def plain(self) -> Made:
        """On one rank, with the script unchanged.

        Raises:
            UsageError: it makes no `Loop`, or Lockstep refuses the `Loop`.
            LockstepError: it does not run.
        """
        try:
            return self.made("first", 1)
        except ExperimentFailed as failed:
            if failed.refused:
                raise UsageError(failed.error) from None
            remedy = "fix it; that file has the output and the traceback"
            text = f"the script does not run on one rank: {failed.error}"
            raise LockstepError(text, where=str(self.log), remedy=remedy) from None

    def again(self) -> Made:
        """The same once more. The draws of its steps are recorded."""
        return self.made("second", 1, notice=True)

    def reference(self) -> Made:
        """On one rank, so that runs with a different split can be compared with it."""
        first = self.plain()
        if not self.again().first.draws and not first.first.batch_norms and first.first.precision == "fp32":
            return first
        return self.made("reference", 1, exact=True, notice=True)

    def on_ranks(self) -> Made:
        """On `nproc` ranks."""
        return self.made("ranks", self.nproc, exact=True)

    def rounding(self) -> float:
        """The distance of two runs that rounding explains."""
        reference = self.reference()
        noise = script_compare.distance(reference, self.made("reversed", 1, exact=True, reverse=True))
        return script_compare.bound(noise, reference.first.epsilon, len(reference.first.losses))

    def made(self, name: str, world: int, **changes: Any) -> Made:
        """The run `name` on `world` ranks.

        Raises:
            ExperimentFailed: a rank failed.
        """
        if name not in self._made:
            answers = self.answers(name, world, **changes)
            self._made[name] = Made(self.folder / name, values_of(name, answers))
        return self._made[name]

    def answers(self, name: str, world: int, **changes: Any) -> list[Any]:
        """What the ranks of a run answered."""
        run = replace(self.asked, folder=str(self.folder / name), **changes)
        with self.log.open("a") as log:
            print(f"\n==== {name}: {number_of(world, 'rank')}", file=log)
        workers = self.workers or Workers(self.log)
        try:
            return workers.run(world, answering, run_script, run)
        finally:
            if self.workers is None:
                workers.close()


def determinism(runs: ScriptRuns) -> CheckResult:
    """The same script twice on one rank."""
    first, again = runs.plain(), runs.again()
    step = script_compare.first_step_of_bits(first.first, again.first)
    different = script_compare.differing_bits(first, again)
    count = len(first.first.losses)
    more: dict[str, Any] = {
        "value": float(step is not None or bool(different)),
        "bound": 0.0,
        "what": "runs that differ",
    }
    if step is None and not different:
        return passed(f"{count} steps on one rank, twice: every loss and parameter the same", **more)
    curves = {"first": _curve(first), "second": _curve(again)}
    if first.first.samples != again.first.samples:
        text = "the training data differ between two runs of the script: seed the code that makes them"
    elif step == 0:
        names = script_compare.names_at(first.first, again.first, 0)
        text = f"the first weights differ between two runs ({names}): call torch.manual_seed before making the model"
    else:
        names = script_compare.names_at(first.first, again.first, step or count) or ", ".join(different[:3])
        text = f"two runs on one rank differ from step {step or count} on" + (f", most in {names}" if names else "")
    causes = runs.causes.words("random", "clocks")
    return fault(f"{text}. Likely causes: {causes}" if causes else text, curves=curves, **more)


def ranks(runs: ScriptRuns) -> CheckResult:
    """On N ranks, with the same global batches."""
    if runs.nproc < 2:
        return not_shown(_ONE_RANK)
    return _compared(runs, runs.on_ranks(), f"{runs.nproc} ranks and one rank", ("ranks", "clocks"))


def accumulation(runs: ScriptRuns) -> CheckResult:
    """On one rank, with smaller, uneven micro-batches."""
    largest = runs.reference().first.micro
    if largest < 2:
        return not_shown("a micro-batch has only one sample and cannot be split")
    micro = max(1, largest * 2 // 5)
    made = runs.made("accumulation", 1, exact=True, micro=micro)
    return _compared(runs, made, f"micro-batches of {micro} and of {largest} samples", ("kept",))


def strategies(runs: ScriptRuns) -> CheckResult:
    """On N ranks with FSDP instead of DDP, or DDP instead of FSDP."""
    if runs.nproc < 2:
        return not_shown(_ONE_RANK)
    other = "ddp" if runs.plain().first.strategy == "fsdp" else "fsdp"
    made = runs.made(other, runs.nproc, exact=True, strategy=other)
    return _compared(runs, made, f"{other} on {runs.nproc} ranks and one rank", ("ranks", "clocks"))


def resume(runs: ScriptRuns) -> CheckResult:
    """A rank is killed midway, and the script is started again."""
    undisturbed = runs.on_ranks()
    count, rank = len(undisturbed.first.losses), runs.nproc - 1
    if count < _FEWEST_STEPS:
        return not_shown(f"the script makes {number_of(count, 'step')}, but a kill midway needs {_FEWEST_STEPS}")
    every = max(1, count // 4)
    killed_after = 2 * every + 1
    changes = {"exact": True, "save_every": every}
    answers = runs.answers("killed", runs.nproc, kill=(rank, killed_after), **changes)
    killed = answers[rank]
    if not isinstance(killed, WorkerEnded) or killed.exit_code != -signal.SIGKILL or killed.reason:
        return fault(f"rank {rank} failed before it was killed: {getattr(killed, 'error', None) or killed}")
    resumed = runs.made("killed", runs.nproc, **changes)
    start = resumed.first.start
    words = f"rank {rank} killed after step {killed_after}, resumed from step {start}"
    step = script_compare.first_step_of_bits(undisturbed.first, resumed.first)
    different = script_compare.differing_bits(undisturbed, resumed)
    more: dict[str, Any] = {"value": float(len(different)), "bound": 0.0, "what": "tensors that differ"}
    if step is None and not different:
        return passed(f"{words}: weights bit-identical to those of the undisturbed run", **more)
    if step is not None and step == start:
        return fault(f"{words}: the resumed run does not start with the state of step {start}", **more)
    names = script_compare.names_at(undisturbed.first, resumed.first, step or count) or ", ".join(different[:3])
    text = f"{words}: it differs from step {step or count} on, most in {names}"
    likely = runs.causes.words("kept", "random", "clocks")
    text += f". Likely causes: {likely}" if likely else ". Keep what the loop changes in loop.state"
    return fault(text, curves={"undisturbed": _curve(undisturbed), "resumed": _curve(resumed, count)}, **more)


CHECKS: dict[str, Callable[[ScriptRuns], CheckResult]] = {
    "determinism": determinism,
    "ranks": ranks,
    "accumulation": accumulation,
    "strategies": strategies,
    "resume": resume,
}


def _compared(runs: ScriptRuns, made: Made, words: str, kinds: Sequence[str]) -> CheckResult:
    """Compare a run with that on one rank, within rounding."""
    reference, limit = runs.reference(), runs.rounding()
    found = script_compare.distance(reference, made)
    more: dict[str, Any] = {"value": found.largest, "bound": limit}
    more["what"] = "largest difference of weights, relative to what training moved, or of losses"
    notes = _switched_off(runs)
    apart = _ranks_apart(made)
    if found.largest <= limit and not apart and not compare.is_too_large(limit):
        off = f" ({'; '.join(notes)})" if notes else ""
        return passed(f"{words}: equal up to rounding{off}", notes=notes, **more)
    step = found.first_step(limit)
    causes = _causes(runs, made, kinds, step=step)
    text = f"{words} differ from step {step} on" if step is not None else f"{words} differ in the final weights"
    text += f", most in {found.worst()}" if found.worst() else ""
    text = f"{apart}; {text}" if apart else text
    draws = reference.first.draws
    curves = {"one rank": _curve(reference), "compared": _curve(made)}
    more |= {"notes": notes, "curves": curves}
    if draws and not apart:
        drawn = f"the loop body draws random numbers ({', '.join(draws[:3])}), different ones by rank and micro-batch"
        read = runs.causes.words("ranks")
        return not_shown(f"{drawn}: {text}" + (f"; {read}" if read else ""), **more)
    if found.largest <= limit and not apart:
        return not_shown(f"rounding alone may move the weights by {limit:.1%} of what training moves", **more)
    return fault(text + (f". Likely causes: {causes}" if causes else ""), **more)


def _causes(runs: ScriptRuns, made: Made, kinds: Sequence[str], *, step: int | None) -> str:
    """Possible reasons why a run differs, as a sentence."""
    reference = runs.reference()
    found = []
    for rank, recording in enumerate(made.ranks):
        differing = [
            n
            for n, pair in enumerate(zip(reference.first.samples, recording.samples, strict=False))
            if pair[0] != pair[1]
        ]
        if differing:
            found.append(f"the training data of rank {rank} differ from the run on one rank: seed what makes them")
            break
    found.append(runs.causes.words(*kinds, "random"))
    if step == 1:
        found.append(
            "a loss that is a mean over something other than samples: pass its count: step.backward(loss, units=...)"
        )
    return "; ".join(text for text in found if text)


def _ranks_apart(made: Made) -> str:
    """A sentence about ranks whose weights differ; empty if they are equal, or sharded."""
    if made.first.is_sharded:
        return ""
    for rank, recording in enumerate(made.ranks[1:], 1):
        for step in sorted(recording.sketches):
            names = script_compare.names_at(made.first, recording, step)
            if names:
                return f"rank {rank} has different weights than rank 0 after step {step} ({names})"
    return ""


def _switched_off(runs: ScriptRuns) -> list[str]:
    """What the comparisons switch off, because its results depend on how a batch is split."""
    first, off = runs.plain().first, []
    gone = [draw for draw in runs.again().first.draws if draw not in runs.reference().first.draws]
    if gone:
        off.append(f"without dropout: {', '.join(gone[:3])}")
    if first.batch_norms:
        names = ", ".join(first.batch_norms[:3]) or "the model"
        off.append(f"BatchNorm ({names}) with fixed statistics: it normalises over each rank's micro-batch")
    if first.precision != "fp32":
        off.append(f"in fp32 instead of {first.precision}")
    return off


def _curve(made: Made, count: int | None = None) -> list[float]:
    losses = made.first.losses
    return [losses.get(step, float("nan")) for step in range(1, (count or max(losses, default=0)) + 1)]
