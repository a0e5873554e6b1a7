"""Do all ranks train the same model, and the model that one process trains?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lockstep.core.errors import listed, number_of
from lockstep.parts.replicas import ReplicaDifference, differing, other_losses
from lockstep_lab.verify import compare
from lockstep_lab.verify.checks import bits
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed
from lockstep_lab.verify.same_bits import Way

Train = Callable[..., list[Recording]]
_SHOWN = 8  # ranks, and tensors, in the rows of a check
_LARGEST_ROUNDING = 10.0
"""No strategy may round more than this many times what one process does: more would hide faults."""
_64 = (1 << 64) - 1
ONE_RANK = "one rank cannot be compared with others; give --nproc 2 or more"


def probe(experiments: ExperimentRunner) -> CheckResult:
    """The same batch has the same loss on every rank, bit for bit, after some of the steps."""
    if experiments.nproc == 1:
        return not_shown(ONE_RANK)
    complaint, _ = _initial_difference(experiments.undisturbed())
    if complaint:
        return fault(complaint, value=math.inf, bound=0.0, what="difference of the losses of one batch")
    probes = experiments.undisturbed()[0].probes
    rows = [
        {"step": step, "rank": rank} | {head: f"{float.fromhex(loss):.17g}" for head, loss in own.items()}
        for step, losses in sorted(probes.items())
        for rank, own in enumerate(losses[:_SHOWN])
    ]
    for step, losses in sorted(probes.items()):
        found = other_losses(losses)
        if found is not None:
            head, who = found
            values = [float.fromhex(own[head]) for own in losses]
            other = next(value for value in values if value.hex() != values[0].hex())
            return fault(
                f"after step {step} {who} in the {head} of one batch: {values[0]:.17g} and {other:.17g}",
                value=abs(values[0] - other),
                bound=0.0,
                what="difference of the losses of one batch",
                rows=rows,
            )
    steps = ", ".join(map(str, sorted(probes)))
    text = f"one batch has the same loss on {experiments.nproc} ranks after steps {steps}"
    return passed(text, value=0.0, bound=0.0, rows=rows)


def replicas(experiments: ExperimentRunner) -> CheckResult:
    """Weights, buffers and optimizer state are equal on all ranks after every step; shards make one whole copy."""
    if experiments.nproc == 1:
        return not_shown(ONE_RANK)
    recordings = experiments.undisturbed()
    complaint, count = _initial_difference(recordings)
    if complaint:
        return fault(complaint, value=float(count), bound=0.0, what="tensors that differ")
    for step in sorted(recordings[0].digests):
        others = _differing(recordings, step)
        if others:
            first = others[0]
            return fault(
                f"since step {step} {first.who} in {first.name}, and {number_of(len(others) - 1, 'other tensor')}",
                value=float(len(others)),
                bound=0.0,
                what="tensors that differ",
                rows=_rows(recordings, step, [one.name for one in others]),
            )
        incomplete = _incomplete(recordings, step)
        if incomplete:
            return fault(
                f"the ranks hold no whole copy of {incomplete} after step {step}",
                value=1.0,
                bound=0.0,
                what="incomplete tensors",
            )
    tensors, steps = len(recordings[0].shapes), len(recordings[0].digests.keys() - {0})
    state = "one whole copy between the ranks" if recordings[0].sharded else "the same on all ranks"
    last = max(recordings[0].digests, default=0)
    return passed(
        f"{tensors} tensors are {state} after each of {steps} steps",
        value=0.0,
        bound=0.0,
        what="tensors that differ",
        rows=_rows(recordings, last, list(recordings[0].digests.get(last, {}))),
    )


def _rows(recordings: list[Recording], step: int, names: list[str]) -> list[dict[str, Any]]:
    """The digests of some tensors after a step, by rank, with the tensor rows that the rank holds."""
    rows: list[dict[str, Any]] = []
    for name in names[:_SHOWN]:
        for rank, recording in enumerate(recordings[:_SHOWN]):
            if name in recording.digests.get(step, {}):
                start, count, digest = recording.digests[step][name]
                number = "".join(f"{half & _64:016x}" for half in digest)
                place = f"{start} to {start + count}"
                rows.append({"step": step, "tensor": name, "rank": rank, "rows": place, "digest": number})
    return rows


def _initial_difference(recordings: list[Recording]) -> tuple[str, int]:
    """A complaint about initial weights that differ between ranks, and their number; empty if none differ."""
    others = _differing(recordings, 0)
    if not others:
        return "", 0
    first, ranks = others[0], others[0].ranks
    return (
        f"the initial weights differ: {first.name.removeprefix('model.')} and "
        f"{number_of(len(others) - 1, 'other tensor', 'is', 'are')} "
        f"not the same on ranks {ranks[0]} and {ranks[1]} before the first step"
    ), len(others)


def _differing(recordings: list[Recording], step: int) -> list[ReplicaDifference]:
    """Tensors with rows that two ranks hold with different values."""
    return differing([recording.digests.get(step, {}) for recording in recordings])


def _incomplete(recordings: list[Recording], step: int) -> str | None:
    """A tensor with rows that no rank holds, or that some rank lacks entirely."""
    shapes = {name: shape for recording in recordings for name, shape in recording.shapes.items()}
    # State may appear in a later step, so only tensors of this step count.
    for name in dict.fromkeys(name for recording in recordings for name in recording.digests.get(step, {})):
        shape = shapes[name.partition("[")[0]]
        parts = [recording.digests.get(step, {}).get(name) for recording in recordings]
        if None in parts and "[" not in name:  # no rank holds all columns
            return name
        covered = 0
        for start, rows, _ in sorted(part for part in parts if part is not None):
            covered = max(covered, start + rows) if start <= covered else covered
        if covered < (shape[0] if shape else 1):
            return name
    return None


def ranks(experiments: ExperimentRunner) -> CheckResult:
    """One process and all ranks train the same model: losses and weights are as close as rounding explains."""
    if experiments.nproc == 1:
        return not_shown(ONE_RANK)
    if difference := experiments.dependence_on_hashes():
        return fault(difference)
    if found := bits.instead(experiments, [Way(((ranks, None),)) for ranks in (1, experiments.nproc)]):
        return found
    name = f"{experiments.nproc} ranks"
    return compare_with_one_process(experiments, f"{experiments.nproc}-ranks", experiments.all_ranks, words=name)


def accumulation(experiments: ExperimentRunner) -> CheckResult:
    """The same if each rank splits its samples into several uneven micro-batches."""
    nproc, micro_batch = experiments.nproc, experiments.small_micro_batch
    count = -(-experiments.global_batch // (micro_batch * experiments.groups))
    words = f"{nproc} ranks, {count} micro-batches of up to {micro_batch}"
    found = compare_with_one_process(experiments, "accumulated", experiments.accumulated, words=words)
    moved = experiments.accumulated()[0].moves_in_passes if found.status == "fault" else []
    if not moved:
        return found
    reason = f"each forward pass changes {listed(moved, 3)}, so the number of micro-batches affects the model"
    return not_shown(
        reason, value=found.value, bound=found.bound, what=found.what, notes=found.notes, curves=found.curves
    )


def compare_with_one_process(
    experiments: ExperimentRunner, name: str, train: Train, *, words: str, rounds_differently: bool = False
) -> CheckResult:
    """Compare losses and weights of a training with those of `ExperimentRunner.one_process`.

    Args:
        name: of the training, whose folder has its checkpoint.
        train: runs the training.
        words: describe the training for people.
        rounds_differently: it may round more than one process does, such as FSDP, which adds up the gradients within
            a block first. If it differs by more than the bound, `ExperimentRunner.own_rounding_bound` counts.
    """
    probe = experiments.probe()
    if (obstacle := probe.obstacle()) is not None:
        return not_shown(obstacle)
    bound = experiments.rounding_bound()
    try:
        recordings = train()
    except ExperimentFailed as failed:
        if failed.refused:
            return not_shown(failed.error)
        raise
    difference = experiments.difference_from_one_process(name, recordings)
    notes = probe.notes()
    if rounds_differently and bound < difference.largest <= _LARGEST_ROUNDING * bound:
        own = experiments.own_rounding_bound(name, recordings, train)
        bound = max(bound, min(own or 0.0, _LARGEST_ROUNDING * bound))
        found = f"round more than one process does: the bound is {bound:.2g}" if own else "differ when repeated"
        notes = [*notes, f"{words} {found}"]
    curve, other_curve = experiments.one_process()[0].losses, recordings[0].losses
    more = {
        "value": difference.largest,
        "bound": bound,
        "what": f"difference after {experiments.steps} steps",
        "notes": notes,
        "curves": {"one process": curve, words: other_curve},
    }
    is_different = not difference.largest <= bound
    if (is_different or compare.is_too_large(bound)) and _differs_when_repeated(experiments):
        return not_shown("the same training already differs when repeated; see determinism", **more)
    if compare.is_too_large(bound) and (difference.largest <= bound or not math.isfinite(bound)):
        return not_shown(
            f"rounding alone moves the weights by {bound / 30:.2g} of what training moves, "
            f"which could hide a fault; try fewer --steps{probe.precision()}",
            **more,
        )
    if difference.missing:
        return fault(f"the models have different tensors: {', '.join(difference.missing[:5])}", **more)
    if is_different:
        step = compare.first_difference(curve, other_curve, bound)
        since = f" since step {step + 1}" if step is not None else ""
        text = (
            f"{words} train a different model than one process: weights {difference.weights:.2g} apart "
            f"(most in {difference.worst}), losses {difference.losses:.2g}{since}"
        )
        return fault(text, experiments.cut() or probe.diagnosis(), **more)
    return passed(f"{words} and one process train the same model{probe.precision()}", **more)


def _differs_when_repeated(experiments: ExperimentRunner) -> bool:
    """True if the same training has a different result the second time."""
    try:
        runs = experiments.undisturbed(), experiments.undisturbed_again()
    except ExperimentFailed:  # other checks report it
        return False
    return compare.first_difference_of_runs(*runs) is not None
