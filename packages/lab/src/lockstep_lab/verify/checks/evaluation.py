"""Are metrics and predictions those of a plain loop, on any number of ranks?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.core.errors import number_of
from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.data_probe import other_preparation
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed

_PREDICTED_SAMPLES = 64
_LARGEST_MICRO_BATCH = 16
_CUTTING_BOUND, _CUTTING_BOUND_16 = 1e-3, 5e-2  # rounding may move a sample to a different class
_LONGEST_EXAMPLE = 200  # characters
_METRIC_BOUND = 1e-6  # torchmetrics adds in float32; losses are bitwise equal


def evaluation(experiments: ExperimentRunner) -> CheckResult:
    """Every metric on all ranks is the metric of one process, and of a plain loop without the engine.

    If the evaluation draws random numbers, the plain loop draws different ones and is not compared.
    """
    experiments.undisturbed()
    if experiments.data_sizes()[1] == 0:
        return not_shown("there is no evaluation data")
    nproc = experiments.nproc
    micro = _micro_batch(experiments, _LARGEST_MICRO_BATCH)
    config, folder = experiments.short_config(batch__micro=micro), str(experiments.folder / "undisturbed")
    # A partial micro-batch at the end, and a number of micro-batches that the ranks cannot share evenly.
    changes = TaskChanges(eval_samples=(2 * nproc + 1) * micro + micro // 2 + 1)
    disturbed = replace(changes, disturb_generators=True)
    evaluate = worker_functions.evaluate
    on_all_ranks = experiments.run("evaluated-on-all-ranks", nproc, evaluate, config, folder, changes)[0]
    (on_one_process,) = experiments.run("evaluated-on-one-process", 1, evaluate, config, folder, disturbed)
    (by_loop,) = experiments.run(
        "evaluated-by-a-loop", 1, worker_functions.evaluate_by_loop, config, folder, changes, micro
    )
    (prepared,) = experiments.run("preparation", 1, other_preparation, config)
    if prepared:
        return fault(prepared)
    if on_one_process.keys() <= {"samples", "bad"}:
        return not_shown("an evaluation has no number: the loss needs Task.embed, and the task has no metrics")
    rows = [
        {
            "metric": key,
            f"{nproc} ranks": on_all_ranks.get(key),
            "one process": on_one_process.get(key),
            "plain loop": by_loop.get(key),
        }
        for key in on_one_process | on_all_ranks
    ]
    probe = experiments.probe()
    random = list(dict.fromkeys(probe.random_in_evaluation + probe.random_in_prediction))
    worst, largest = _largest_difference(on_one_process, [on_all_ranks] if random else [on_all_ranks, by_loop])
    more = {"value": largest, "bound": _METRIC_BOUND, "what": "largest relative difference of a metric", "rows": rows}
    if largest > _METRIC_BOUND:
        return fault(
            f"{worst} is {on_all_ranks.get(worst)} on {nproc} ranks, {on_one_process.get(worst)} on one, "
            f"{by_loop.get(worst)} by a plain loop",
            **more,
        )
    complaint = _wrong_plan(experiments, min(changes.eval_samples or 0, experiments.data_sizes()[1]), micro)
    if complaint:
        return fault(complaint, **more)
    text = (
        f"{number_of(len(on_one_process) - 2, 'metric')} over "
        f"{number_of(on_one_process['samples'], 'sample', 'is', 'are')} those of one process"
    )
    complaint = "" if random or probe.without_statistics else _depends_on_cutting(experiments, by_loop, micro, changes)
    if complaint:
        return fault(complaint, probe.diagnosis() if complaint.startswith("loss") else "", **more)
    if random:
        more["notes"] = [
            "not compared with a plain loop: the task draws random numbers in evaluation mode "
            f"({', '.join(random[:3])}), so the same batch gives different results. If this is not intended: "
            "pass training=self.training to functional.dropout"
        ]
        return passed(text, **more)
    return passed(f"{text} and of a plain loop", **more)


def _micro_batch(experiments: ExperimentRunner, largest: int) -> int:
    """The size of the micro-batches of an evaluation: the config's, but at most `largest`."""
    asked = experiments.config["batch"]["micro"] or min(experiments.global_batch, 256)
    asked = min(asked.values()) if isinstance(asked, dict) else int(asked)
    return max(1, min(asked, largest))


def _wrong_plan(experiments: ExperimentRunner, length: int, micro: int) -> str:
    """A complaint if the plan of an evaluation of `length` samples repeats or omits a sample; else empty."""
    world = experiments.nproc
    plans = experiments.run("evaluation-plan", 1, worker_functions.planned_evaluations, length, micro, world)[0]
    for what, indices in plans.items():
        used = Counter(indices)
        wrong = [index for index in {*range(length), *used} if used[index] != 1]
        if wrong:
            first = min(wrong)
            return (
                f"{what} of {length} samples in micro-batches of {micro} on {world} ranks uses sample {first} "
                f"{used[first]} times; it must use each sample once"
            )
    return ""


def _depends_on_cutting(
    experiments: ExperimentRunner, by_loop: Mapping[str, float], micro: int, changes: TaskChanges
) -> str:
    """A complaint if the plain loop finds different metrics with smaller micro-batches; else empty.

    A mean over batch values does, and so does a metric that compares outputs with other samples' labels.

    Args:
        by_loop: the metrics with micro-batches of `micro` samples.
    """
    smaller = micro // 2
    if not smaller:
        return ""
    probe = experiments.probe()
    couples = probe.compares_samples or probe.by_statistics  # then the loss depends on the split, but metrics must not
    config, folder = experiments.short_config(batch__micro=micro), str(experiments.folder / "undisturbed")
    (again,) = experiments.run(
        "evaluated-by-a-loop-in-smaller-batches",
        1,
        worker_functions.evaluate_by_loop,
        config,
        folder,
        changes,
        smaller,
    )
    if couples:
        by_loop, again = (
            {key: value for key, value in values.items() if key.partition("/")[0] != "loss"}
            for values in (by_loop, again)
        )
    worst, largest = _largest_difference(by_loop, [again])
    bound = _CUTTING_BOUND if experiments.config["precision"] == "fp32" else _CUTTING_BOUND_16
    if largest <= bound:
        return ""
    return (
        f"{worst} is {by_loop.get(worst)} if a plain loop evaluates {micro} samples at a time, and "
        f"{again.get(worst)} if it evaluates {smaller}: it must not depend on how samples are batched. A "
        "mean over batch values does, and so does a metric that mixes samples"
    )


def _largest_difference(reference: Mapping[str, float], others: list[dict[str, float]]) -> tuple[str, float]:
    """The metric that differs most from `reference`, and its relative difference; infinite if one side lacks it."""
    worst, largest = "", 0.0
    for key in {key for metrics in (reference, *others) for key in metrics}:
        for other in others:
            difference = _relative_difference(reference.get(key), other.get(key))
            if difference > largest:
                worst, largest = key, difference
    return worst, largest


def _relative_difference(first: float | None, second: float | None) -> float:
    if first is None or second is None:
        return math.inf
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if math.isfinite(first) and math.isfinite(second):
        return abs(first - second) / max(abs(first), abs(second))
    return math.inf


def predictions(experiments: ExperimentRunner) -> CheckResult:
    """Predictions on all ranks are those of a plain loop, and differ if their truths differ."""
    experiments.learned(1)
    baseline, probe, nproc = experiments.baseline(), experiments.probe(), experiments.nproc
    if probe.sees_future:
        return fault(
            f"{probe.sees_future}, which is its target. Likely cause: the model has no causal mask, or its labels are "
            "shifted once too often"
        )
    if probe.changes_batch:
        return fault(
            f"{probe.changes_batch} writes into its batch, so the metrics, and what else uses the batch, get other "
            "numbers. Likely cause: an in-place operation on a tensor of the batch, such as add_ or x[mask] = 0: use a "
            "copy"
        )
    if baseline.no_data or baseline.no_predict:
        return not_shown("there is no evaluation data" if baseline.no_data else "the task has no predict")
    if probe.dropped_in_prediction:
        return fault(
            f"Task.predict drops features at random, with {probe.dropped_in_prediction}. Likely cause: a dropout "
            "function without training=self.training, or a module in training mode. For Monte-Carlo dropout, let "
            "predict return the mean of several passes, or write training=True"
        )
    if probe.random_in_prediction:
        names = ", ".join(probe.random_in_prediction[:3])
        return not_shown(f"Task.predict draws random numbers ({names}), different ones for each micro-batch")
    # Several micro-batches for each rank, and a partial one at the end.
    micro = _micro_batch(experiments, max(1, _PREDICTED_SAMPLES // (3 * nproc) - 1))
    config, folder = experiments.short_config(batch__micro=micro), str(experiments.learned_folder())
    changes = TaskChanges(eval_samples=_PREDICTED_SAMPLES)
    (rows,) = experiments.run("predicted-by-a-loop", 1, worker_functions.predict_by_loop, config, folder, changes)
    engine = experiments.run("predicted", nproc, worker_functions.predict, config, folder, changes)[0]
    summaries = [row.pop(worker_functions.OUTPUT, []) for row in rows]
    summaries_of_engine = [row.pop(worker_functions.OUTPUT, []) for row in engine]
    truths = {repr(row["truth"]) for row in rows if row["truth"] is not None}
    answers = [{key: value for key, value in row.items() if key not in ("truth", "probability")} for row in rows]
    different = {repr(answer) for answer in answers}
    more = {
        "value": float(len(different)),
        "what": f"different predictions of {len(rows)}",
        "rows": [{"sample": number} | row for number, row in enumerate(rows[:12])],
    }
    tolerance = 1e-3 if experiments.config["precision"] == "fp32" else 5e-2
    wrong = [
        number
        for number, row in enumerate(rows)
        if len(engine) <= number
        or not _is_same_prediction(row, engine[number], tolerance)
        or not _are_same_tensors(summaries[number], summaries_of_engine[number], tolerance)
    ]
    if len(wrong) > len(rows) // 20 or len(engine) != len(rows):  # a few samples may be between two classes
        first = wrong[0] if wrong else len(rows)
        example = ""
        if first < min(len(rows), len(engine)):
            example = f"sample {first} by itself is {_brief(rows[first])}, and {_brief(engine[first])} on {nproc} ranks"
            padded = _padded(rows[first], engine[first])
            if padded:
                example = (
                    f"the output for sample {first} has the shape {padded[0]} alone, and {padded[1]} on {nproc} ranks: "
                    "batches are padded to their longest sample. The numbers before the padding also differ: mask "
                    f"the padding in the model. {example}"
                )
            elif _is_same_prediction(rows[first], engine[first], tolerance):
                example = (
                    f"the output for sample {first} by itself has tensors of (shape, mean, norm) {summaries[first]}, "
                    f"and {summaries_of_engine[first]} on {nproc} ranks"
                )
        text = f"{len(wrong)} of {len(rows)} predictions ({len(engine)} made) differ from a plain loop's: {example}"
        if probe.prediction_difference:
            text = (
                "Task.predict returns different outputs for the same batch and seed: "
                f"{probe.prediction_difference}. {text}"
            )
        return fault(text.rstrip(". "), **more)
    if len(different) == 1 and len(truths) > 1:
        return fault(f"all {len(rows)} samples get the same prediction, despite {len(truths)} different truths", **more)
    known = f" with {number_of(len(truths), 'different truth')}" if truths else ""
    padded, notes = next(filter(None, map(_padded, rows, engine)), None), list[str]()
    if padded:
        notes = [
            f"outputs are padded to the longest sample of a batch, such as from {padded[0]} to {padded[1]}, and only "
            "values before the padding are compared. A Presenter that cuts it off makes `lockstep predict` write the "
            "same for every batch.micro"
        ]
    if not truths:
        notes.append("Presenter.truth returns no label, so predictions are shown without their truths")
    more["notes"] = notes
    return passed(
        f"{number_of(len(different), 'different prediction')} for {number_of(len(rows), 'sample')}{known}, "
        "equal to those of a plain loop",
        **more,
    )


def _are_same_tensors(by_loop: Sequence[Any], by_engine: Sequence[Any], tolerance: float) -> bool:
    """True if two outputs have the same tensors, as `worker_functions.summary` describes them, up to rounding.

    Tensors with different shapes are not compared: a batch of several samples may have padded them.
    """
    return len(by_loop) == len(by_engine) and all(
        shape != other_shape or _is_same_prediction(list(numbers), list(others), tolerance)
        for (shape, *numbers), (other_shape, *others) in zip(by_loop, by_engine, strict=True)
    )


def _padded(by_loop: Any, by_engine: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of an output by itself and in a batch that padded it; for a mapping, those of the first such one."""
    if isinstance(by_loop, Mapping) and isinstance(by_engine, Mapping):
        pairs = ((value, by_engine[key]) for key, value in by_loop.items() if key in by_engine)
        return next(filter(None, (_padded(*pair) for pair in pairs)), None)
    if not isinstance(by_loop, Tensor | np.ndarray) or type(by_loop) is not type(by_engine):
        return None
    one, other = tuple(by_loop.shape), tuple(by_engine.shape)
    longer = len(one) == len(other) and one != other and all(a <= b for a, b in zip(one, other, strict=True))
    return (one, other) if longer else None


def _brief(value: Any) -> str:
    """The beginning of a description of an output."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_EXAMPLE else f"{text[:_LONGEST_EXAMPLE]} ..."


def _is_same_prediction(by_loop: Any, by_engine: Any, tolerance: float) -> bool:
    """True if two descriptions of an output are the same, up to rounding of numbers. Only `by_loop` has a `truth`.

    The loop predicts single samples, so a tensor of the engine may be longer by the padding of its batch.
    """
    if _padded(by_loop, by_engine) and not isinstance(by_loop, Mapping):
        by_engine = by_engine[tuple(map(slice, by_loop.shape))]
    if isinstance(by_loop, Tensor | np.ndarray | np.generic) and type(by_loop) is type(by_engine):
        by_loop, by_engine = by_loop.tolist(), by_engine.tolist()
    if isinstance(by_loop, float) and isinstance(by_engine, float):
        both_nan = math.isnan(by_loop) and math.isnan(by_engine)
        return both_nan or math.isclose(by_loop, by_engine, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(by_loop, Mapping) and isinstance(by_engine, Mapping):
        keys = by_loop.keys() - {"truth"}
        return keys == by_engine.keys() and all(
            _is_same_prediction(by_loop[key], by_engine[key], tolerance) for key in keys
        )
    if isinstance(by_loop, list | tuple) and isinstance(by_engine, list | tuple):
        return len(by_loop) == len(by_engine) and all(
            _is_same_prediction(first, second, tolerance) for first, second in zip(by_loop, by_engine, strict=True)
        )
    return repr(by_loop) == repr(by_engine)
