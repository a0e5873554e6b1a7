"""Do all ranks train the same model, and the model that one process trains?"""

from __future__ import annotations

import math
from collections.abc import Callable

from lockstep.verify import compare
from lockstep.verify.experiments import ExperimentFailed, Experiments
from lockstep.verify.recorder import Recording
from lockstep.verify.result import CheckResult, fault, not_shown, passed

ONE_RANK = "one rank has no other rank to be compared with; give --nproc 2 or more"


def probe(experiments: Experiments) -> CheckResult:
    """The same batch has the same loss on every rank, bit for bit, after some of the steps."""
    if experiments.nproc == 1:
        return not_shown(ONE_RANK)
    complaint, _ = _initial_difference(experiments.undisturbed())
    if complaint:
        return fault(complaint, value=math.inf, bound=0.0, what="difference of the losses of one batch")
    probes = experiments.undisturbed()[0].probes
    for step, losses in sorted(probes.items()):
        rank = next((rank for rank, loss in enumerate(losses) if loss != losses[0]), None)
        if rank is not None:
            head = next(head for head in losses[0] if losses[rank][head] != losses[0][head])
            first, other = float.fromhex(losses[0][head]), float.fromhex(losses[rank][head])
            return fault(
                f"after step {step} the {head} of one batch is {first:.9g} on rank 0 and {other:.9g} on rank {rank}",
                value=abs(first - other),
                bound=0.0,
                what="difference of the losses of one batch",
            )
    steps = ", ".join(map(str, sorted(probes)))
    return passed(f"one batch has the same loss on {experiments.nproc} ranks after steps {steps}", value=0.0, bound=0.0)


def replicas(experiments: Experiments) -> CheckResult:
    """Weights, buffers and optimizer state are the same on all ranks after every step; shards make one whole copy."""
    if experiments.nproc == 1:
        return not_shown(ONE_RANK)
    recordings = experiments.undisturbed()
    complaint, count = _initial_difference(recordings)
    if complaint:
        return fault(complaint, value=float(count), bound=0.0, what="tensors that differ")
    for step in sorted(recordings[0].digests):
        differing = _differing(recordings, step)
        if differing:
            name, ranks = differing[0]
            return fault(
                f"{name} differs between ranks {ranks[0]} and {ranks[1]} since step {step}, "
                f"with {len(differing) - 1} other tensors",
                value=float(len(differing)),
                bound=0.0,
                what="tensors that differ",
            )
        incomplete = _incomplete(recordings, step)
        if incomplete:
            return fault(
                f"the ranks hold no whole copy of {incomplete} after step {step}",
                value=1.0,
                bound=0.0,
                what="tensors that are not whole",
            )
    tensors, steps = len(recordings[0].shapes), len(recordings[0].digests.keys() - {0})
    state = "one whole copy between the ranks" if recordings[0].sharded else "the same on all ranks"
    return passed(
        f"{tensors} tensors are {state} after each of {steps} steps", value=0.0, bound=0.0, what="tensors that differ"
    )


def _initial_difference(recordings: list[Recording]) -> tuple[str, int]:
    """A complaint about initial weights that differ between ranks, and their number; empty where none differs."""
    differing = _differing(recordings, 0)
    if not differing:
        return "", 0
    name, ranks = differing[0]
    return (
        f"the initial weights differ: {name.removeprefix('model.')} and {len(differing) - 1} other tensors are not the "
        f"same on ranks {ranks[0]} and {ranks[1]} before the first step"
    ), len(differing)


def _differing(recordings: list[Recording], step: int) -> list[tuple[str, tuple[int, int]]]:
    """Tensors of which two ranks hold the same rows with other values, each with a pair of such ranks."""
    differing: dict[str, tuple[int, int]] = {}
    first_digests: dict[tuple[str, int, int], tuple[int, int]] = {}
    for rank, recording in enumerate(recordings):
        for name, (start, rows, digest) in recording.digests.get(step, {}).items():
            first_rank, first_digest = first_digests.setdefault((name, start, rows), (rank, digest))
            if digest != first_digest:
                differing.setdefault(name, (first_rank, rank))
    return list(differing.items())


def _incomplete(recordings: list[Recording], step: int) -> str | None:
    """A tensor of which no rank holds some rows, or which some rank does not have at all."""
    shapes = {name: shape for recording in recordings for name, shape in recording.shapes.items()}
    # State may appear in a later step, so only tensors of this step count.
    for name in dict.fromkeys(name for recording in recordings for name in recording.digests.get(step, {})):
        shape = shapes[name]
        parts = [recording.digests.get(step, {}).get(name) for recording in recordings]
        if None in parts:
            return name
        covered = 0
        for start, rows, _ in sorted(part for part in parts if part is not None):
            covered = max(covered, start + rows) if start <= covered else covered
        if covered < (shape[0] if shape else 1):
            return name
    return None


def ranks(experiments: Experiments) -> CheckResult:
    """One process and all ranks train the same model: losses and weights are as close as rounding explains."""
    if experiments.nproc == 1:
        return not_shown(ONE_RANK)
    if difference := experiments.dependence_on_hashes():
        return fault(difference)
    name = f"{experiments.nproc} ranks"
    return compare_with_one_process(experiments, f"{experiments.nproc}-ranks", experiments.all_ranks, words=name)


def accumulation(experiments: Experiments) -> CheckResult:
    """The same where each rank cuts its samples into several uneven micro-batches."""
    nproc, micro_batch = experiments.nproc, experiments.small_micro_batch
    count = -(-experiments.global_batch // (micro_batch * nproc))
    words = f"{nproc} ranks, {count} micro-batches of up to {micro_batch}"
    return compare_with_one_process(experiments, "accumulated", experiments.accumulated, words=words)


def strategies(experiments: Experiments) -> CheckResult:
    """The same with DDP where the config says FSDP, and with FSDP where it says DDP."""
    nproc = experiments.nproc
    if nproc == 1:
        return not_shown("one rank shards nothing; give --nproc 2 or more")
    other = "fsdp" if experiments.strategy == "ddp" else "ddp"
    config = experiments.exact_config(batch__micro=None)
    config["parallel"]["strategy"] = other

    def train() -> list[Recording]:
        return experiments.train(other, nproc, config, changes=experiments.exact_changes())

    return compare_with_one_process(experiments, other, train, words=f"{nproc} ranks with {other}")


def compare_with_one_process(
    experiments: Experiments, name: str, train: Callable[[], list[Recording]], *, words: str
) -> CheckResult:
    """Compare losses and weights of a training with those of `Experiments.one_process`.

    Args:
        name: of the training, whose folder has its checkpoint.
        train: makes the training.
        words: describe the training for people.
    """
    probe = experiments.probe()
    obstacle = probe.obstacle()
    if obstacle is not None:
        return not_shown(obstacle)
    bound = experiments.rounding_bound()
    try:
        recordings = train()
    except ExperimentFailed as failed:
        if failed.refused:
            return not_shown(failed.error)
        raise
    difference = experiments.difference_from_one_process(name, recordings)
    curve, other_curve = experiments.one_process()[0].losses, recordings[0].losses
    more = {
        "value": difference.largest,
        "bound": bound,
        "what": f"difference after {experiments.steps} steps",
        "notes": probe.notes(),
        "curves": {"one process": curve, words: other_curve},
    }
    is_different = not difference.largest <= bound
    if (is_different or compare.is_too_large(bound)) and _differs_when_repeated(experiments):
        return not_shown("the same training twice already differs; see determinism", **more)
    if compare.is_too_large(bound) and (difference.largest <= bound or not math.isfinite(bound)):
        return not_shown(
            f"rounding alone moves the weights by {bound / 30:.2g} of what training moves, "
            f"so that a fault could hide in it; try fewer --steps{probe.precision()}",
            **more,
        )
    if difference.missing:
        return fault(f"the models have other tensors: {', '.join(difference.missing[:5])}", **more)
    if is_different:
        step = compare.first_difference(curve, other_curve, bound)
        since = f" since step {step + 1}" if step is not None else ""
        text = (
            f"{words} train another model than one process: weights {difference.weights:.2g} apart "
            f"(most in {difference.worst}), losses {difference.losses:.2g}{since}"
        )
        return fault(f"{text}. {probe.diagnosis()}".rstrip(". "), **more)
    return passed(f"{words} and one process train the same model{probe.precision()}", **more)


def _differs_when_repeated(experiments: Experiments) -> bool:
    """Whether the same training has another result the second time."""
    try:
        runs = experiments.undisturbed(), experiments.undisturbed_again()
    except ExperimentFailed:  # other checks say so
        return False
    return compare.first_difference_of_runs(*runs) is not None
