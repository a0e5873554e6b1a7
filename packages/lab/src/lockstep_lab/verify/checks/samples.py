"""Is every sample used once per epoch, by one rank, in the order that seed and global batch determine?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.draws import complaint as complaint_of_draws
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.reference import order
from lockstep_lab.verify.result import CheckResult, fault, passed

_MOST_PLANNED = 1_000_000  # samples of an epoch whose whole plan is checked
_FEWEST_SHUFFLED = 8  # fewer samples may repeat their order by chance


def samples(experiments: ExperimentRunner) -> CheckResult:
    """Ranks use each sample once per epoch, none twice, and those that seed, step and global batch determine."""
    try:
        recordings = experiments.undisturbed()
    except ExperimentFailed as failed:
        if failed.has_different_data:
            return fault(failed.error)
        raise
    length, config, batch = experiments.train_samples, experiments.config, experiments.global_batch
    length = min(length, experiments.data_sizes()[0])
    draws = experiments.planned_draws(length)
    drop_last, skips = config["data"]["drop_last"], config["data"]["on_error"] != "raise"
    grouping = {"group_by_length": config["data"]["group_by_length"], "lengths": experiments.train_lengths(length)}
    steps_per_epoch = order.steps_per_epoch(length, batch, drop_last=drop_last)
    epochs: dict[int, Counter[int]] = {}
    more: dict[str, Any] = {"value": 0.0, "bound": 0.0, "what": "samples lost, repeated or shared"}
    for step in range(experiments.steps):
        by_rank = _samples_of_step(recordings, step)
        if draws is not None:
            if complaint := complaint_of_draws(step, draws[step], by_rank, skips=skips):
                return fault(complaint, **more | {"value": 1.0})
            continue
        used = Counter(index for indices in by_rank for index in indices)
        planned, epoch = order.samples_of_step(
            step, length=length, global_batch=batch, seed=config["seed"], drop_last=drop_last, **grouping
        )
        wanted = set(planned)
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
                f"of a different step: {foreign[:5] or 'none'}",
                **more,
            )
        epochs.setdefault(epoch, Counter()).update(used)
    whole_epochs = experiments.steps // steps_per_epoch if draws is None else 0
    for epoch in range(whole_epochs):
        counts = epochs.get(epoch, Counter())
        expected = steps_per_epoch * batch if drop_last else length
        more["value"] = float(abs(expected - len(counts)) + sum(counts.values()) - len(counts))
        if (len(counts) != min(expected, length) and not skips) or max(counts.values()) > 1:
            return fault(
                f"epoch {epoch} uses {len(counts)} of {length} samples, some {max(counts.values())} times", **more
            )
    seeded, alike = experiments.probe().seeded_for_sample, experiments.probe().seeded_alike
    if alike:
        return fault(
            f"reading a sample seeds {' and '.join(alike)} with the same number for the first and last sample: "
            "augmentation draws the same numbers for every sample and in every epoch. Remove the seeding; each "
            "sample already has its own seed",
            **more,
        )
    if seeded:
        more["notes"] = [f"reading sample 0 seeds {' and '.join(seeded)}: later draws are the same in every epoch"]
    if draws is not None:
        drawn = sum(map(len, draws))
        text = f"{experiments.steps} steps on {experiments.nproc} ranks use the {drawn} samples that the data set draws"
        return passed(f"{text}, {drawn - sum(len(set(step)) for step in draws)} repeated within their step", **more)
    total = experiments.data_sizes()[0]
    planned_text = ""
    if total <= _MOST_PLANNED:
        complaint = _wrong_plan(experiments, total)
        if complaint:
            return fault(complaint, **more)
        planned_text = f"; so do the plans of two epochs of all {total}, each in its own order"
    return passed(
        f"{whole_epochs} whole epochs of {length} samples on {experiments.nproc} ranks use each sample once"
        f"{planned_text}",
        **more,
    )


def _samples_of_step(recordings: list[Recording], step: int) -> list[tuple[int, ...]]:
    """The indices that each rank used in `step`; ranks without the step are left out."""
    return [indices for recording in recordings for at, _, indices in recording.samples if at == step]


def _wrong_plan(experiments: ExperimentRunner, total: int) -> str:
    """A complaint if the plans of two epochs of all `total` samples are wrong; else empty.

    Each epoch must have each sample once, in its own order, which is not the order of the data set.
    """
    batch, drop_last = experiments.global_batch, experiments.config["data"]["drop_last"]
    plan = {"length": total, "global_batch": batch, "seed": experiments.config["seed"], "drop_last": drop_last}
    lengths = experiments.train_lengths(None)
    if lengths is not None:
        plan |= {"group_by_length": experiments.config["data"]["group_by_length"], "lengths": np.array(lengths)}
    world = {"micro_batch": experiments.small_micro_batch, "world": experiments.groups}
    (epochs,) = experiments.run("plan", 1, worker_functions.planned_epochs, 2, plan | world)
    expected = min(total, order.steps_per_epoch(total, batch, drop_last=drop_last) * batch)
    for epoch, indices in enumerate(epochs):
        used = set(indices)
        if len(indices) != expected or len(used) != expected or not used <= set(range(total)):
            return (
                f"the plan of epoch {epoch} of all {total} samples has {len(indices)} places for {len(used)} samples; "
                f"it must have each of {expected} samples once"
            )
    first, second = epochs
    if total >= _FEWEST_SHUFFLED and first == list(range(expected)):
        return f"the samples of an epoch of all {total} are not shuffled"
    if total >= _FEWEST_SHUFFLED and first == second:
        return f"the first two epochs of all {total} samples have the same order"
    return ""
