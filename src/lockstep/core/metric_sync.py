"""Merge the metric states of all ranks, so that the metric on N ranks is the metric on one rank.

torchmetrics' own synchronisation is not used. It needs states of equal shapes on every rank, and breaks or hangs if
a rank has no samples. For metrics that keep a mean it also computes a mean of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core import devices
from lockstep.core.data.tensors import to_cpu
from lockstep.core.parallel.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from lockstep.core.task import MetricsUpdate

State = tuple[int, dict[str, Any]]
"""For one metric: the number of its updates, and its state by name."""
_MERGE_AGAIN = ("sum", "mean", "max", "min")  # reductions of torchmetrics that take their own result, too


def place(metrics: MetricCollection, update: MetricsUpdate, device: torch.device) -> MetricsUpdate:
    """Move the metrics to the device of the batches, and return the function that feeds a batch to them.

    On mps, metrics stay on the CPU and get copies: mps has no float64, and lacks operations that some metrics use.
    """
    if devices.of(device).has_float64:
        metrics.to(device)
        return update

    def update_on_cpu(metrics: MetricCollection, output: Any, batch: Any) -> None:
        update(metrics, to_cpu(output), to_cpu(batch))

    return update_on_cpu


def states(metrics: MetricCollection) -> list[State]:
    """The state of each metric, copied to the CPU. This waits for the device."""
    return [
        (part.update_count, {name: to_cpu(value, compact) for name, value in part.metric_state.items()})
        for part in parts_of(metrics)
    ]


def fits(metrics: MetricCollection, saved: list[State]) -> bool:
    """False if `saved`, from another process, is of different metrics."""
    names = [part._defaults.keys() for part in parts_of(metrics)]
    if len(names) != len(saved):
        return not saved
    return all(state.keys() in (set(), own) for own, (_, state) in zip(names, saved, strict=True))


def load(metrics: MetricCollection, saved: list[State]) -> None:
    """Set metrics to the states that `states` returned. Empty: they stay as they are."""
    for part, (count, state) in zip(parts_of(metrics), saved, strict=False):
        for name, value in state.items():
            setattr(part, name, value.to(getattr(part, name).device))
        part._update_count, part._computed = count, None


def joined(metrics: MetricCollection, several: Sequence[list[State]]) -> list[State]:
    """The states that the metrics would have after the updates of all `several`, in this order."""
    parts = parts_of(metrics)
    return [_joined(part, [one[number] for one in several]) for number, part in enumerate(parts)]


def compute(
    metrics: MetricCollection, world: World, before: Sequence[list[State]] = ()
) -> tuple[dict[str, float], dict[str, Any]]:
    """Merge the states of all ranks in the order of ranks, and compute the metrics on rank 0. All ranks call it.

    Args:
        before: states of this rank that come before those of `metrics`.

    Returns:
        the numbers by name, as `flatten` names them, on every rank; and the values as the metrics computed them, on
        rank 0 only. Both are empty if no rank saw a sample.
    """
    gathered = world.gather_once([*before, states(metrics)])
    values: dict[str, Any] = {}
    if gathered is not None:
        metrics.to("cpu")
        merge(metrics, [states_of for rank in gathered for states_of in rank])
        if any(part.update_count for part in parts_of(metrics)):
            values = metrics.compute()
    return world.broadcast(flatten(values)), values


def parts_of(metrics: MetricCollection | Metric) -> list[Metric]:
    """All metrics in a collection, also those inside of other metrics, in a fixed order."""
    from torchmetrics import Metric

    parts = [module for module in metrics.modules() if isinstance(module, Metric)]
    for part in parts:
        part.distributed_available_fn = bool  # False: `compute` runs only on rank 0: it must not wait for other ranks
    return parts


def merge(metrics: MetricCollection, several: Sequence[list[State]]) -> None:
    """Set metrics on the CPU to the states that they would have after the updates of all `several`."""
    for part, (count, state) in zip(parts_of(metrics), joined(metrics, several), strict=True):
        if count:
            for name, value in state.items():
                setattr(part, name, value)
            part._update_count = count
            part._computed = None


def _joined(metric: Metric, several: list[State]) -> State:
    """The state that `metric` would have after the updates of all `several`."""
    updated = [(count, state) for count, state in several if count]
    if not updated:
        return 0, {}
    counts = torch.tensor([float(count) for count, _ in updated])
    reductions: dict[str, Any] = dict(metric._reductions)
    merged = {
        name: _merge_values([state[name] for _, state in updated], counts, reduction)
        for name, reduction in reductions.items()
    }
    return int(counts.sum()), merged


def has_fixed_size(metric: Metric) -> bool:
    """True if the state of a metric stays as large as it is, and can be merged again and again."""
    parts = parts_of(metric)
    reductions = [reduction for part in parts for reduction in part._reductions.values()]
    defaults = [default for part in parts for default in part._defaults.values()]
    return (
        bool(defaults)
        and all(isinstance(default, Tensor) for default in defaults)
        and all(any(_is(f"dim_zero_{how}", reduction) for how in _MERGE_AGAIN) for reduction in reductions)
    )


def _merge_values(values: list[Any], counts: Tensor, reduction: Any) -> Any:
    """One state of a metric, from the values on the ranks.

    torchmetrics defines what a reduction means (`Metric.add_state`): a list is concatenated; a tensor is reduced over a
    stack of the ranks' tensors. A mean is weighted by the number of updates.
    """
    if isinstance(values[0], list):
        items = [item for value in values for item in value]
        stays_list = reduction is None or not items or _is("dim_zero_cat", reduction)
        return items if stays_list else reduction(torch.cat(items))
    if _is("dim_zero_cat", reduction):
        return torch.cat([value.reshape(-1) if value.ndim == 0 else value for value in values])
    if _is("dim_zero_mean", reduction):
        return torch.tensordot(counts.to(values[0].dtype), torch.stack(values), dims=1) / counts.sum()
    if reduction is None:
        return torch.stack(values) if len(values) > 1 else values[0]
    return reduction(torch.stack(values))


def _is(name: str, reduction: Any) -> bool:
    return getattr(reduction, "__name__", "") == name


def compact(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU, copied if it is a small view of a large storage: pickle writes the whole storage."""
    plain = tensor.detach().cpu()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def flatten(values: dict[str, Any]) -> dict[str, float]:
    """The values of a metric collection as numbers by name.

    A vector gives `name/0`, `name/1`, ... A dict gives `name/key`. A tensor of two or more dimensions gives no number,
    and so does a tuple or a list, such as the points of a curve: `Presenter.report` and `Presenter.pictures` may show
    it.
    """
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten({f"{name}/{key}": item for key, item in value.items()})
        elif isinstance(value, tuple | list) or (isinstance(value, Tensor) and value.ndim > 1):
            continue
        elif isinstance(value, Tensor) and value.numel() > 1:
            flat |= {f"{name}/{number}": item for number, item in enumerate(value.flatten().tolist())}
        else:
            flat[name] = float(value)
    return flat
