"""Does training with virtual ranks have the same bits on any number of ranks?"""

from __future__ import annotations

from lockstep.core.errors import number_of
from lockstep_lab.verify import same_bits
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed
from lockstep_lab.verify.same_bits import Way

_DIGITS = 16  # of a SHA-256, for people


def bits(experiments: ExperimentRunner) -> CheckResult:
    """The same bits on 1, 2, 3 and 4 ranks, and with another number of ranks after each stop."""
    most = experiments.gpus or same_bits.virtual_ranks(experiments)
    return compared(experiments, same_bits.ways(experiments, most))


def instead(experiments: ExperimentRunner, ways: list[Way]) -> CheckResult | None:
    """The same comparison, if the config has virtual ranks, or if a right training depends on the split of its batches.

    With the same virtual ranks, the split is the same on any number of ranks. None: neither is so.
    """
    wanted, probe = experiments.config["parallel"]["virtual_ranks"], experiments.probe()
    why = None if probe.unrepeatable() or experiments.groups < experiments.nproc else probe.dependence_on_split()
    if not wanted and not why:
        return None
    try:
        found = compared(experiments, ways)
    except ExperimentFailed as failed:
        if wanted or not failed.refused:
            raise
        return not_shown(str(why))
    found.notes += [] if wanted else [f"compared with parallel.virtual_ranks, because {why}"]
    return found


def compared(experiments: ExperimentRunner, ways: list[Way]) -> CheckResult:
    """Compare the training in each way, bit for bit, with the first: on one rank."""
    count, length = same_bits.virtual_ranks(experiments), same_bits.steps(experiments)
    if min(count, max(ranks for way in ways for ranks, _ in way.parts)) == 1:
        return not_shown("a single rank or virtual rank cannot be divided differently")
    what = {"what": "tensors that differ", "bound": 0.0}
    try:
        outcomes = {way: same_bits.train(experiments, way) for way in ways}
    except ExperimentFailed as failed:
        if "has no deterministic implementation" not in failed.error:
            raise
        return not_shown(failed.error.splitlines()[0])
    first, reference = next(iter(outcomes.items()))
    rows = [{"ranks": str(way), "sha256 of the checkpoint": one.checkpoint} for way, one in outcomes.items()]
    curves = {
        str(way): [one.entries[step]["train/loss"] for step in sorted(one.entries) if "train/loss" in one.entries[step]]
        for way, one in outcomes.items()
    }
    for way, outcome in list(outcomes.items())[1:]:
        found = same_bits.first_difference(reference, outcome, count)
        if found is not None:
            text = f"{count} virtual ranks on {first} and on {way}: {found.words}"
            why = same_bits.cause(experiments, way, outcome, found)
            return fault(f"{text}. {why}", value=float(max(1, found.tensors)), rows=rows, curves=curves, **what)
    text = (
        f"{number_of(length, 'step')} of {count} virtual ranks on {'; '.join(map(str, ways))}: the same bits "
        "in every tensor"
    )
    text += f", logged figure and checkpoint (sha256 {reference.checkpoint[:_DIGITS]})"
    return passed(text, value=0.0, rows=rows, curves=curves, **what)
