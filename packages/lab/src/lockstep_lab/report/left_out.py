"""Evaluates a run's checkpoint, and computes what the results would be without each part of the samples.

Each part is evaluated once. The results without a part come from the sums and states of all others, so they cost no
further forward pass. This is the delete-a-group jackknife: Kott, "The Delete-a-Group Jackknife", Journal of Official
Statistics 17 (2001), 521-526.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.configs import config_file
from lockstep.core import evaluate, metric_sync, task_checks
from lockstep.core.data import fingerprint
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.errors import UsageError, number_of
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.run_data import EvaluationData
from lockstep.trainer import assemble
from lockstep.trainer.trained_model import TrainedModel
from lockstep_lab.report.intervals import EvaluatedRun

_PARTS, _FEW_PARTS = 50, 20
"""Parts of the samples. Fewer for metrics that keep all outputs, because these take longer to compute."""
_COMPARED = 16
"""Samples of each set whose content is compared between runs."""


def of_run(folder: Path, overrides: Sequence[str] = (), keys: Sequence[str] = ()) -> EvaluatedRun:
    """Evaluate the checkpoint of a run that `lockstep evaluate` takes, in this process.

    Args:
        overrides: changes to the run's config, such as `data.eval=other.csv`.
        keys: keys that may be changed.

    Raises:
        UsageError: this process is one of several ranks, or there are too few samples.
        LockstepError: as `Trainer.evaluate`.
    """
    config = config_file.read_run(folder, overrides, keys)
    config = config_file.with_kept_task(config, folder, lambda line: print(line, file=sys.stderr))
    setup = assemble.Setup(config, folder, quiet=True)
    with assemble.joined(config, folder) as world:
        if world.size > 1:
            raise UsageError("several ranks run it", where="--evaluate", remedy="start it without a launcher")
        used = TrainedModel(setup, assemble.make_task(config), world, None)
        strategy = used.load()
        assert used.loaded_step is not None
        found = EvaluatedRun(used.loaded_step)
        for name, task in assemble.evaluated_tasks(used.setup, used.task, world).items():
            evaluated = used.evaluation_data(name, task)
            with strategy.inference() as forward:
                precision = Precision(config.precision, world.device)
                _add(found, evaluated, partial(_measured, evaluated, forward, precision, world))
        return found


def _add(found: EvaluatedRun, evaluated: EvaluationData, measure: Callable[[Sequence[int]], _Sums]) -> None:
    """Add the results of a set of evaluation data."""
    count = evaluated.plan.count
    indices = [evaluated.plan.index(place) for place in range(count)]
    metrics, _ = task_checks.metrics(evaluated.task)
    is_quick = metrics is None or all(map(metric_sync.has_fixed_size, metric_sync.parts_of(metrics)))
    parts = min(_PARTS if is_quick else _FEW_PARTS, count)
    if parts < 2:
        remedy = "give more evaluation data: data.eval=PATH"
        raise UsageError(f"an interval needs more than {number_of(count, 'sample')}", where="--evaluate", remedy=remedy)
    sums = [measure(indices[part::parts]) for part in range(parts)]
    full = _results(sums, evaluated)
    others = [_results([*sums[:part], *sums[part + 1 :]], evaluated) for part in range(parts)]
    prefix = f"eval/{evaluated.name}/" if evaluated.name else "eval/"
    found.full |= {prefix + name: value for name, value in full.items()}
    found.without |= {prefix + name: [other.get(name, float("nan")) for other in others] for name in full}
    found.better |= {prefix + name: sign for name, sign in _directions(evaluated, full).items()}
    found.samples[evaluated.name] = (
        count,
        fingerprint.digests(evaluated.data, indices[:: -(-count // _COMPARED)]),
    )


def _measured(
    evaluated: EvaluationData, forward: nn.Module, precision: Precision, world: World, indices: Sequence[int]
) -> _Sums:
    """The sums over some samples."""
    added = evaluate.EvaluationSums(evaluated.task, forward, world, precision=precision)
    size = evaluated.plan.micro_batch
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    plans = [MicroBatchPlan(tuple(chunk), 0, False) for chunk in chunks]
    for micro_batch in evaluate.micro_batches(forward, evaluated.loader, plans=plans, world=world):
        added.add(micro_batch)
    return _Sums(added.losses(), [] if added.metrics is None else metric_sync.states(added.metrics))


@dataclass(frozen=True)
class _Sums:
    """What one part of the samples adds to the results."""

    losses: list[tuple[dict[str, float], dict[str, float]]]
    """Loss sums and units of each micro-batch, by head."""
    states: list[metric_sync.State]


def _results(sums: Sequence[_Sums], evaluated: EvaluationData) -> dict[str, float]:
    """The loss and the metrics over some parts."""
    results = evaluate.means([[pair for one in sums for pair in one.losses]], evaluated.task.coefficients)
    metrics: Any = task_checks.metrics(evaluated.task)[0]
    if metrics is not None:
        metrics.to("cpu")
        metric_sync.merge(metrics, [one.states for one in sums])
        results |= metric_sync.flatten(metrics.compute())
    return results


def _directions(evaluated: EvaluationData, results: Mapping[str, float]) -> dict[str, int]:
    """A loss is better if it is lower. Metrics know it: `higher_is_better` of torchmetrics."""
    metrics: Any = task_checks.metrics(evaluated.task)[0] or {}
    by_key = {key: metric.higher_is_better for key, metric in metrics.items()} | {"loss": False}
    known = {name: by_key.get(name.split("/")[0]) for name in results}
    return {name: 1 if higher else -1 for name, higher in known.items() if higher is not None}
