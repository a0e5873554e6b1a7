"""Is the training the same when it is repeated, killed and resumed, or resumed on a different number of ranks?"""

from __future__ import annotations

import math
import random
import signal
from dataclasses import replace
from pathlib import Path

from lockstep.core.errors import number_of
from lockstep.parts.digest import digest
from lockstep_lab.verify import compare, cut_model, same_bits, worker_functions
from lockstep_lab.verify.checks import bits
from lockstep_lab.verify.checks.replicas import ONE_RANK, compare_with_one_process
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.recorder import RecorderOptions, Recording
from lockstep_lab.verify.reference.checkpoint import SavedState, complete, newest
from lockstep_lab.verify.reference.data import units_of
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed
from lockstep_lab.verify.same_bits import Way
from lockstep_lab.verify.worker_functions import TrainingRun
from lockstep_lab.verify.workers import WorkerEnded

_LOGGED = 1e-6  # of the largest loss; losses are added in float64


def determinism(experiments: ExperimentRunner) -> CheckResult:
    """The same training twice is bitwise equal."""
    difference = compare.first_difference_of_runs(experiments.undisturbed(), experiments.undisturbed_again())
    more = {"value": float(difference is not None), "bound": 0.0, "what": "runs that differ"}
    if difference is None:
        complaint = _same_random_numbers(experiments) or _recomputed_otherwise(experiments)
        if complaint:
            return fault(complaint, **more)
        steps, nproc = experiments.steps, experiments.nproc
        return passed(f"{steps} steps on {nproc} ranks, twice: every batch, loss and tensor the same", **more)
    step, text = difference
    if experiments.not_deterministic:
        text += f"; {experiments.not_deterministic}"
    cause = experiments.probe().cause_of_indeterminism()
    if cause:
        return fault(f"{cause} ({text})", **more)
    if " gets a different batch " not in text:
        text += _first_operation(experiments, step)
    return fault(text, **more)


def _same_random_numbers(experiments: ExperimentRunner) -> str:
    """A complaint if forward passes draw the same random numbers in two steps or on two ranks; else empty."""
    drawing = experiments.probe().random
    if not drawing:
        return ""
    seen: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    for rank, recording in enumerate(experiments.undisturbed()):
        for step, _, indices in recording.samples:
            # The last state of a step: the first step may begin with a trial pass.
            for state in recording.generators.get(step, [])[-1:]:
                other_step, other_rank, others = seen.setdefault(state, (step, rank, indices))
                if (step, indices) != (other_step, others):
                    return (
                        f"the forward passes of step {other_step + 1} on rank {other_rank} and of step {step + 1} on "
                        f"rank {rank} begin with the same random numbers: {', '.join(drawing[:3])} is the same in both"
                    )
    return ""


def _recomputed_otherwise(experiments: ExperimentRunner) -> str:
    """A complaint if training without recomputation differs; else empty. Compiled code rounds differently."""
    compute = experiments.config["compute"]
    if not compute["activation_checkpointing"] or compute["compile"]:
        return ""
    found = compare.first_difference_of_runs(experiments.undisturbed(), experiments.without_recomputation())
    return f"compute.activation_checkpointing trains a different model than without it: {found[1]}" if found else ""


def _first_operation(experiments: ExperimentRunner, step: int) -> str:
    """Train twice more up to `step`, and name the first operation whose result differs."""
    runs = [
        experiments.train(
            f"operations-{number}",
            experiments.nproc,
            experiments.config_with_checkpoints(),
            changes=TaskChanges(train_samples=experiments.train_samples),
            record=RecorderOptions(operations_step=step),
            stop_at=step + 1,
            keep=False,
        )
        for number in (1, 2)
    ]
    for rank, (recording, other) in enumerate(zip(*runs, strict=True)):
        pairs = zip(recording.operations, other.operations, strict=False)
        for number, (operation, other_operation) in enumerate(pairs, 1):
            if operation != other_operation:
                return (
                    f"; the first operation that differs is {operation[0]}, number {number} of the step on rank {rank}"
                )
    return "; every operation of the step was the same in two more runs, so it does not happen every time"


def resume(experiments: ExperimentRunner) -> CheckResult:
    """Killed at a random step and resumed, the training ends with the same weights and optimizer state, bit for bit.

    The resumed training has different states of the global generators around each step. If the config has several
    loader workers, it has one fewer. It counts its operations with a separate pass. Its result must depend on none of
    this.
    """
    complaint = _wrong_checkpoint(experiments.undisturbed(), experiments.folder / "undisturbed")
    if complaint:
        return fault(complaint)
    nproc, steps, folder = experiments.nproc, experiments.steps, experiments.folder
    rank, step = random.randrange(nproc), random.randrange(max(1, steps // 4) + 1, steps)
    changes = TaskChanges(train_samples=experiments.train_samples)
    run = TrainingRun(
        "killed", nproc, experiments.config_with_checkpoints(), str(folder / "killed"), changes, kill=(rank, step)
    )
    killed = experiments.workers.run(nproc, experiments.wrap, worker_functions.train, run)[rank]
    if not isinstance(killed, WorkerEnded):
        return fault(f"the run failed before it could be killed: {killed.error}")
    if killed.exit_code != -signal.SIGKILL or killed.reason:
        return fault(f"the run failed before it could be killed: {killed}")
    words = f"rank {rank} was killed after step {step}"
    before = newest(folder / "killed")
    if before is None:
        return not_shown(f"{words}, before a checkpoint was written")
    workers = experiments.config["data"]["workers"]
    # All steps in one entry of the log, which must equal what the undisturbed training logged step by step. The entry
    # has a count of operations: a pass that the undisturbed training does not make.
    config = experiments.config_with_checkpoints(
        data__workers=max(min(1, workers), workers - 1), log__every_steps=experiments.steps, log__flops=True
    )
    record = RecorderOptions(disturb_generators=True)
    recordings = experiments.train("resumed", nproc, config, changes=changes, record=record, resume="killed")
    return _compare_resumed(experiments, recordings, words=words, killed_after=step, checkpoint_step=before.step)


def _compare_resumed(
    experiments: ExperimentRunner, resumed: list[Recording], *, words: str, killed_after: int, checkpoint_step: int
) -> CheckResult:
    """Compare the last checkpoint of the resumed training with that of the undisturbed training."""
    undisturbed, steps = experiments.undisturbed(), experiments.steps
    checkpoint = newest(experiments.folder / "killed")
    reference = newest(experiments.folder / "undisturbed")
    if checkpoint is None or reference is None:
        return fault(f"{words}: the {'resumed' if reference else 'undisturbed'} run left no checkpoint")
    start = resumed[0].samples[0][0] if resumed[0].samples else steps
    words += f", resumed from step {start}"
    different = compare.differing_names(reference, checkpoint)
    more = {"value": float(len(different)), "bound": 0.0, "what": "tensors that differ"}
    if start != checkpoint_step or checkpoint.step != steps:
        return fault(
            f"{words}, although the newest checkpoint was of step {checkpoint_step}; "
            f"it ended at step {checkpoint.step} of {steps}",
            **more,
        )
    not_saved = [
        name for name in undisturbed[0].shapes if not name.startswith("buffer.") and name not in reference.names
    ]
    if not_saved:
        return fault(
            f"a checkpoint does not hold {not_saved[0]} and {number_of(len(not_saved) - 1, 'other')}, "
            "which belong to the training's state",
            **more,
        )
    if not different:
        complaint = _wrong_log(undisturbed, resumed, start)
        if complaint:
            return fault(complaint, **more)
        repeated = f" ({number_of(killed_after - start, 'step')} repeated)" if killed_after > start else ""
        return passed(f"{words}{repeated}: weights and optimizer state bit-identical", **more)
    if compare.first_difference_of_runs(undisturbed, experiments.undisturbed_again()) is not None:
        return not_shown("the same run already differs when repeated; see determinism", **more)
    return fault(
        f"{words}: {different[0]} and {number_of(len(different) - 1, 'other', 'differs', 'differ')} from the "
        "undisturbed run; "
        "either they were not restored, or something used an unseeded generator",
        **more,
    )


def _wrong_checkpoint(recordings: list[Recording], folder: Path) -> str:
    """A complaint if a checkpoint on disk is not the state that the ranks had after its step; else empty."""
    for state in map(SavedState, complete(folder)):
        shares = [recording.digests.get(state.step, {}) for recording in recordings]
        names = state.names & {name.partition("[")[0] for share in shares for name in share}
        wrong = []
        for name, tensor in state.read(names):
            if any(digest(part) != of_rank for part, of_rank in cut_model.parts(name, tensor, shares)):
                wrong.append(name)
        if wrong:
            return (
                f"the checkpoint of step {state.step} differs from the state after that step: {wrong[0]} and "
                f"{number_of(len(wrong) - 1, 'other', 'differs', 'differ')}. Either something else was saved, "
                "or it changed while it was written"
            )
    return ""


def _wrong_log(undisturbed: list[Recording], resumed: list[Recording], start: int) -> str:
    """A complaint if a training that logs once logs different losses than one that logs each step.

    The loss of several steps is the mean over their units.

    Args:
        start: the first step of the resumed training, counted from 0.
    """
    by_step = {int(entry["step"]) - 1: entry for entry in undisturbed[0].entries if entry.get("step", 0) > start}
    entry = resumed[0].entries[-1] if resumed[0].entries else {}
    for key in [key for key in entry if key.startswith("train/loss/")] or ["train/loss"]:
        head = key.removeprefix("train/loss").removeprefix("/")
        total = units = largest = 0.0
        for step, of_step in by_step.items():
            counts = [units_of(recording.units.get(step, {}), head) for recording in undisturbed]
            counts = counts if any(counts) or head else [sum(one.units.get(step, {}).values()) for one in undisturbed]
            if key in of_step and math.isfinite(of_step[key]):
                total, units = total + of_step[key] * sum(counts), units + sum(counts)
                largest = max(largest, abs(of_step[key]))
        if units and key in entry and not abs(entry[key] - total / units) <= _LOGGED * largest:
            return (
                f"the {key} that is logged for steps {start + 1} to {int(entry['step'])} together is {entry[key]:.9g}; "
                f"the mean over their units is {total / units:.9g}"
            )
    return ""


def elastic(experiments: ExperimentRunner) -> CheckResult:
    """Stopped and resumed on a different number of ranks: the same samples, and weights as close as rounding explains.

    From a mesh, the training resumes without one, and then on the mesh again.
    """
    first, steps, tensor = experiments.nproc, experiments.steps, experiments.config["parallel"]["tensor"]
    second = first - 1 if first > 1 else 2
    if second > experiments.most_ranks:
        return not_shown(ONE_RANK)
    changing = Way(((first, same_bits.steps(experiments) // 2), (second, None)))
    if found := bits.instead(experiments, [Way(((1, None),)), changing]):
        return found
    words = f"{first} ranks, then {second}"
    parts = [("elastic", first, tensor, steps // 2), ("elastic-resumed", second, tensor, None)]
    if experiments.groups < first:
        words = f"{first} ranks with parallel.tensor={tensor}, then {second} without, then {first} with it"
        parts[1:] = [("elastic-resumed", second, 1, 3 * steps // 4), ("elastic-back", first, tensor, None)]

    def train() -> list[Recording]:
        changes, made, entries = experiments.exact_changes(), list[Recording](), list[dict[str, float]]()
        for name, world, parallel, until in parts:
            config = experiments.exact_config(batch__micro=None, parallel__tensor=parallel)
            made += (part := experiments.train(name, world, config, changes=changes, resume="elastic", stop_at=until))
            entries += part[0].entries[: None if until is None else until - len(entries)]
        if any(_samples_of_step(made, n) != _samples_of_step(experiments.one_process(), n) for n in range(steps)):
            raise ExperimentFailed("elastic", f"{words}: they resume with different samples than one process")
        return [replace(made[0], entries=entries)]

    return compare_with_one_process(experiments, "elastic", train, words=words)


def _samples_of_step(recordings: list[Recording], step: int) -> list[int]:
    return sorted(
        index for recording in recordings for at, _, indices in recording.samples if at == step for index in indices
    )
