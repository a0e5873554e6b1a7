"""What a LightningModule logs: values and metrics, kept separately for each micro-batch and combined exactly."""

from __future__ import annotations

import contextlib
import copy
import numbers
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.core import metric_sync
from lockstep.core.foreign_task import refused, users_line
from lockstep.core.task import Metrics

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_HARMLESS = frozenset(
    """
    prog_bar logger on_step on_epoch enable_graph sync_dist sync_dist_group add_dataloader_idx metric_attribute
    rank_zero_only
    """.split()  # noqa: SIM905 - a table of words
)
_TAKEN = ("loss", "lr", "grad_norm", "samples", "bad", "of_samples", "samples_per_s", "skipped")


class StepLog:
    """What one call of a step logs."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Any, Any]] = {}
        """By name: a number, and its weight. None: the size of the batch."""
        self.metrics: dict[str, Metric] = {}
        """The metrics that were logged as objects, by name."""
        self.calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        """By the identity of a metric: the arguments of each of its updates."""
        self._watched: set[int] = set()

    def log(self, name: str, value: Any, *further: Any, **options: Any) -> None:
        """`LightningModule.log`."""
        reduction, batch_size = options.pop("reduce_fx", "mean"), options.pop("batch_size", None)
        unknown = [key for key in options if key not in _HARMLESS]
        if unknown or len(further) > 3:
            raise refused(f"self.log({name!r}) has {unknown or 'more arguments'}", users_line(), "remove it")
        if reduction not in ("mean", torch.mean):
            what = f"self.log({name!r}, reduce_fx={reduction!r}) is not a mean over samples"
            raise refused(what, users_line(), "log a torchmetrics metric, such as torchmetrics.SumMetric")
        name = f"logged_{name}" if name in _TAKEN else name
        if hasattr(value, "update") and hasattr(value, "compute"):
            if hasattr(value, "items"):  # a MetricCollection
                self.log_dict(value)
                return
            if id(value) not in self._watched:
                what = (
                    f"self.log({name!r}) got a {type(value).__name__}, which is not a torchmetrics.Metric of the module"
                )
                remedy = (
                    "make it a torchmetrics.Metric, and keep it as an attribute of the module or in an nn.ModuleDict"
                )
                raise refused(what, users_line(), remedy)
            self.metrics[name] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            self.values[name] = (value.detach().reshape(()), batch_size)
        elif isinstance(value, numbers.Real):
            self.values[name] = (float(value), batch_size)
        else:
            what = f"self.log({name!r}) got a {type(value).__name__}"
            raise refused(what, users_line(), "log numbers, tensors with one number, or torchmetrics metrics")

    def log_dict(self, dictionary: Any, *further: Any, **options: Any) -> None:
        """`LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, *further, **options)

    @contextlib.contextmanager
    def watching(self, metrics: Sequence[Metric]) -> Generator[None, None, None]:
        """Within this context, the updates of `metrics` are recorded. Afterwards the metrics are reset."""
        depth = 0

        def recorded(metric: Metric, method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                if not depth:  # `forward` calls `update`, once or twice
                    self.calls.setdefault(id(metric), []).append((args, kwargs))
                depth += 1
                try:
                    return method(*args, **kwargs)
                finally:
                    depth -= 1

            return call

        self._watched = {id(metric) for metric in metrics}
        own = [(metric, metric.update, vars(metric).get("forward")) for metric in metrics]
        for metric, update, _ in own:
            vars(metric).update(update=recorded(metric, update), forward=recorded(metric, metric.forward))
        try:
            yield
        finally:
            for metric, update, forward in own:
                vars(metric).update(update=update, forward=forward)
                if forward is None:
                    del metric.forward
                if id(metric) in self.calls:
                    metric.reset()

    def output(self, samples: int, counts: Mapping[str, Any], purpose: str, device: torch.device) -> dict[str, Any]:
        """What is sent to the metrics, with samples along the first dimension: values, their weights, and the arguments
        of metrics.

        Args:
            counts: the number of units by name, for values that are not averaged over samples.
        """

        def each(value: Any) -> Tensor:
            return torch.as_tensor(value, device=device).detach().expand(samples)

        values = {name: each(value) for name, (value, _) in self.values.items()}
        weights = {
            name: each(counts.get(name, samples) if weight is None else weight)
            for name, (_, weight) in self.values.items()
        }
        calls = {(purpose, name): tuple(self.calls.get(id(metric), ())) for name, metric in self.metrics.items()}
        return {"values": values, "weights": weights, "calls": calls}


def metrics_of(names: Sequence[str], objects: Mapping[tuple[str, str], Metric], where: str) -> Metrics | None:
    """The metrics that take such outputs: means of the values `names`, and copies of the logged metrics. Each step has
    its own copies: training and evaluation may log different metrics under the same name. A name that an output lacks
    has no result: training and evaluation may log different names.

    Args:
        where: the line of the step, for errors.
    """
    if not names and not objects:
        return None
    from torchmetrics import Metric

    class Means(Metric):
        """Weighted means by name."""

        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            for state in ("sums", "weights"):
                self.add_state(state, torch.zeros(len(names), dtype=torch.float64), dist_reduce_fx="sum")

        def update(self, output: dict[str, Any] | None) -> None:
            for name, value in (output or {"values": {}})["values"].items():
                if name not in names:
                    remedy = "log the same names for every batch, or log outside the step, in a Part"
                    raise refused(f"self.log({name!r}) is not called for every batch", where, remedy)
                weight: Tensor = output["weights"][name]  # type: ignore[index]
                place = names.index(name)
                product = value[0].to(torch.float64) * weight[0]
                self.sums[place] += product.where(weight[0] > 0, 0.0)  # type: ignore[index,operator]
                self.weights[place] += weight[0]  # type: ignore[index,operator]

        def compute(self) -> dict[str, Tensor]:
            pairs = zip(names, self.sums, self.weights, strict=True)  # type: ignore[arg-type]
            return {name: total / weight for name, total, weight in pairs if weight}

    class Logged(Metric):
        """A metric of the module, updated with the arguments that the module passed."""

        full_state_update = False

        def __init__(self, key: tuple[str, str], metric: Metric) -> None:
            super().__init__()
            self.inner, self.key = copy.deepcopy(metric), key
            self.gives_numbers = key[0] == "train" and metric_sync.has_fixed_size(metric)  # in the training's log
            self.reset()

        def reset(self) -> None:
            super().reset()
            self.inner.reset()

        def update(self, output: dict[str, Any]) -> None:
            for args, kwargs in output["calls"].get(self.key, ()):
                self.inner.update(*args, **kwargs)

        def compute(self) -> dict[str, Any]:
            return {self.key[1]: self.inner.compute()} if self.inner.update_count else {}

    collection: dict[str, Metric] = {"means": Means()} if names else {}
    collection |= {f"logged {place}": Logged(key, metric) for place, (key, metric) in enumerate(objects.items())}

    def update(metrics: Any, output: Any, batch: Any) -> None:
        for key in collection:
            metrics[key].update(output)

    return Metrics(collection, update)


def metrics_in(module: nn.Module) -> tuple[list[Metric], list[MetricCollection]]:
    """The metrics and the collections inside a module. Each metric of a collection sees its own updates."""
    import sys

    if "torchmetrics" not in sys.modules:
        return [], []
    from torchmetrics import Metric, MetricCollection

    collections = [part for part in module.modules() if isinstance(part, MetricCollection)]
    for collection in collections:
        collection._enable_compute_groups, collection._groups_checked = False, False
    return [part for part in module.modules() if isinstance(part, Metric)], collections
