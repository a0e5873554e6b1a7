"""Is every sample used once per epoch, by one rank, in the order that seed and global batch determine?"""

from __future__ import annotations

from collections import Counter

from lockstep.data.order import StepPlan
from lockstep.verify.experiments import Experiments
from lockstep.verify.recorder import Recording
from lockstep.verify.result import CheckResult, fault, passed

_MOST_PLANNED = 1_000_000  # samples of an epoch whose whole plan is checked


def samples(experiments: Experiments) -> CheckResult:
    """Ranks use each sample once per epoch, none twice, and those that seed, step and global batch determine."""
    recordings = experiments.undisturbed()
    length, config = recordings[0].length, experiments.config
    drop_last, skips = config["data"]["drop_last"], config["data"]["on_error"] != "raise"
    plan = StepPlan(length, experiments.global_batch, experiments.global_batch, 1, config["seed"], drop_last)
    epochs: dict[int, Counter[int]] = {}
    more = {"value": 0.0, "bound": 0.0, "what": "samples lost, repeated or shared"}
    for step in range(experiments.steps):
        by_rank = _samples_of_step(recordings, step)
        used = Counter(index for indices in by_rank for index in indices)
        planned, epoch = plan.indices(step)
        wanted = set(planned.tolist())
        repeated = [index for index, count in used.items() if count > 1]
        more["value"] = float(len(repeated) + len(wanted ^ used.keys()))
        if repeated:
            ranks = [rank for rank, indices in enumerate(by_rank) if repeated[0] in indices]
            return fault(
                f"step {step + 1} uses sample {repeated[0]} {used[repeated[0]]} times, on ranks {ranks}", **more
            )
        lost, foreign = sorted(wanted - used.keys()), sorted(used.keys() - wanted)
        if foreign or (lost and not skips):
            return fault(
                f"step {step + 1} uses {len(used)} samples of {len(planned)}; lost: {lost[:5] or 'none'}, "
                f"of another step: {foreign[:5] or 'none'}",
                **more,
            )
        epochs.setdefault(epoch, Counter()).update(used)
    whole_epochs = experiments.steps // plan.steps_per_epoch
    for epoch in range(whole_epochs):
        counts = epochs.get(epoch, Counter())
        expected = plan.steps_per_epoch * experiments.global_batch if drop_last else length
        more["value"] = float(abs(expected - len(counts)) + sum(counts.values()) - len(counts))
        if (len(counts) != min(expected, length) and not skips) or max(counts.values()) > 1:
            return fault(
                f"epoch {epoch} uses {len(counts)} of {length} samples, some {max(counts.values())} times", **more
            )
    total, _ = experiments.data_sizes()
    planned_text = ""
    if total <= _MOST_PLANNED:
        complaint = _wrong_plan(experiments, total)
        if complaint:
            return fault(complaint, **more)
        planned_text = f"; so does the plan of an epoch of all {total}"
    return passed(
        f"{whole_epochs} whole epochs of {length} samples on {experiments.nproc} ranks use each sample once"
        f"{planned_text}",
        **more,
    )


def _samples_of_step(recordings: list[Recording], step: int) -> list[tuple[int, ...]]:
    """The indices that each rank used in `step`; ranks without the step are left out."""
    return [indices for recording in recordings for at, _, indices in recording.samples if at == step]


def _wrong_plan(experiments: Experiments, total: int) -> str:
    """A complaint if the plan of an epoch of all `total` samples does not have each sample once; else empty."""
    config = experiments.config
    plan = StepPlan(
        total,
        experiments.global_batch,
        experiments.small_micro_batch,
        experiments.nproc,
        config["seed"],
        config["data"]["drop_last"],
    )
    counts = Counter(
        index
        for step in range(plan.steps_per_epoch)
        for rank in plan.by_rank(step)
        for micro_batch in rank
        if not micro_batch.filler
        for index in micro_batch.indices
    )
    if max(counts.values()) > 1 or len(counts) != sum(map(plan.samples, range(plan.steps_per_epoch))):
        return (
            f"the plan of an epoch of all {total} samples has {len(counts)} of them, some {max(counts.values())} times"
        )
    return ""
