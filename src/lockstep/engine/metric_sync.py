"""Bring the metric states of all ranks together, so that the metric on N ranks is the metric on one.

torchmetrics' own synchronisation is not used: it needs equally shaped states on every rank (a rank without samples
breaks or hangs it) and averages the averages of metrics that keep a mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.distributed.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def compute(metrics: MetricCollection, world: World) -> tuple[dict[str, float], dict[str, Any]]:
    """Merge the states of all ranks in rank order and compute, on rank 0; every rank gets the result.

    Returns:
        name -> value, as `flatten` names them; and, on rank 0, what the metrics computed. Empty where no rank saw a sample.
    """
    parts = _metric_parts(metrics)
    states = [
        (part.update_count, {name: _to_cpu(value) for name, value in part.metric_state.items()}) for part in parts
    ]
    gathered = world.data_gather(states)
    values: dict[str, Any] = {}
    if gathered is not None:
        metrics.to("cpu")
        for number, part in enumerate(parts):
            _merge(part, [rank[number] for rank in gathered])
        if any(part.update_count for part in parts):
            values = metrics.compute()
    return world.broadcast(flatten(values)), values


def _metric_parts(metrics: MetricCollection) -> list[Metric]:
    from torchmetrics import Metric

    parts = [module for module in metrics.modules() if isinstance(module, Metric)]
    for part in parts:
        part.distributed_available_fn = _never  # `compute` runs on rank 0 alone: it must not wait for the others
    return parts


def _never() -> bool:
    return False


def _merge(metric: Metric, ranks: list[tuple[int, dict[str, Any]]]) -> None:
    """Set `metric` to the state that it would have after the updates of all ranks.

    What a state's reduction means is torchmetrics' contract (`Metric.add_state`): a list is concatenated; a tensor is
    reduced over a stack of the ranks'. Means are weighted by the number of updates behind them.
    """
    seen = [(count, state) for count, state in ranks if count]
    if not seen:
        return
    counts = torch.tensor([float(count) for count, _ in seen])
    reductions: dict[str, Any] = dict(metric._reductions)
    for name, reduction in reductions.items():
        values = [state[name] for _, state in seen]
        merged: Any
        if isinstance(values[0], list):
            items = [item for value in values for item in value]
            merged = (
                items
                if reduction is None or not items or _is("dim_zero_cat", reduction)
                else reduction(torch.cat(items))
            )
        elif _is("dim_zero_cat", reduction):
            merged = torch.cat([value.reshape(-1) if value.ndim == 0 else value for value in values])
        elif _is("dim_zero_mean", reduction):
            merged = torch.tensordot(counts.to(values[0].dtype), torch.stack(values), dims=1) / counts.sum()
        else:
            merged = torch.stack(values) if reduction is None else reduction(torch.stack(values))
            if reduction is None and len(values) == 1:
                merged = values[0]
        setattr(metric, name, merged)
    metric._update_count = int(counts.sum())
    metric._computed = None


def _is(name: str, reduction: Any) -> bool:
    return getattr(reduction, "__name__", "") == name


def compact(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that is no small view of a large one: pickle takes all that is behind a view."""
    plain = tensor.detach().cpu()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return compact(value)
    return [_to_cpu(item) for item in value] if isinstance(value, list) else value


def flatten(values: dict[str, Any]) -> dict[str, float]:
    """What a collection computed as numbers by name: several values give `name/0`, `name/1`, ..., a dict `name/key`; a table none."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten({f"{name}/{key}": item for key, item in value.items()})
        elif isinstance(value, Tensor) and value.ndim > 1:
            continue  # for `Task.report`
        elif isinstance(value, Tensor) and value.numel() > 1:
            flat |= {f"{name}/{number}": item for number, item in enumerate(value.flatten().tolist())}
        else:
            flat[name] = float(value)
    return flat
