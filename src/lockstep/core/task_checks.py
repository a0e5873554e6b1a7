"""Check the types that a task's methods return. Errors name the method, the returned type and the expected type."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.core.data.dataset import forward
from lockstep.core.defaults import is_default
from lockstep.core.errors import UsageError
from lockstep.core.parallel.wrapped_model import without_wrappers
from lockstep.core.presenter import Presenter
from lockstep.core.task import Metrics, Task, update_from_pair

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

    from lockstep.core.task import MetricsUpdate

_MAP_STYLE = "return a map-style data set: an object with len() and [index]"


def model(task: Task) -> nn.Module:
    """The model that the task makes, see `without_wrappers`.

    Raises:
        UsageError: the task returned no module, or one that is wrapped to be spread over ranks.
    """
    returned: Any = task.model()
    if not isinstance(returned, nn.Module):
        remedy = "return a torch.nn.Module, such as nn.Linear(10, 5)"
        raise UsageError(_describe(returned), where="Task.model", remedy=remedy)
    return without_wrappers(returned, "Task.model")


def metrics(task: Task) -> tuple[MetricCollection | None, MetricsUpdate]:
    """The metrics of a task, and the function that updates them with a batch.

    A single metric and a dict of metrics become a collection. The collection is reset. It is None if the task has no
    metrics.

    The collection has no compute groups. In a group, torchmetrics updates one metric for all metrics whose states are
    equal after the first batch. They may be equal by chance: those of top-1 and top-5 accuracy are, if all samples
    of this batch are predicted right.

    Raises:
        UsageError: the task returned something else than metrics.
    """
    returned: Any = task.metrics()
    found, update = (
        (returned.metrics, returned.update) if isinstance(returned, Metrics) else (returned, update_from_pair)
    )
    if found is None:
        return None, update
    from torchmetrics import Metric, MetricCollection

    if isinstance(found, Mapping) and not isinstance(found, MetricCollection):
        if all(isinstance(metric, Metric | MetricCollection) for metric in found.values()):
            found = MetricCollection(dict(found), compute_groups=False)
    elif isinstance(found, Metric):
        found = MetricCollection(found, compute_groups=False)
    elif type(found) is MetricCollection:
        by_name: dict[str, Metric | MetricCollection] = dict(found.items(keep_base=True, copy_state=False))
        found = MetricCollection(by_name, prefix=found.prefix, postfix=found.postfix, compute_groups=False)
    if not isinstance(found, MetricCollection):
        remedy = "return a torchmetrics.MetricCollection, a dict such as {'accuracy': MulticlassAccuracy(10)}, or None"
        raise UsageError(_describe(found), where="Task.metrics", remedy=remedy)
    found.reset()  # a task may return the same objects each time
    return found if len(found) else None, update


def signatures(task: Task) -> None:
    """Check that the methods of a task take the arguments with which Lockstep calls them.

    Raises:
        UsageError: names the method, its line, and the arguments.
    """
    for name in ("prepare", "collate", "weight", "loss", "embed", "predict"):
        expected = [key for key in inspect.signature(getattr(Task, name)).parameters if key != "self"]
        method = getattr(task, name)
        try:
            found = inspect.signature(method, follow_wrapped=False)  # a decorator may call with other arguments
        except (TypeError, ValueError):  # not known, as for methods that are written in C
            continue
        try:
            found.bind(*expected)
        except TypeError as error:
            raise UsageError(
                f"it takes ({', '.join(found.parameters)}), and is called with ({', '.join(expected)}): {error}",
                where=f"Task.{name} ({line_of(method)})",
                remedy=f"write def {name}(self, {', '.join(expected)})",
            ) from error


def line_of(method: Any) -> str:
    """File and line where a method of a task begins; its name, if the place is not known."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else str(method)


def coefficients(task: Task) -> dict[str, float]:
    """The attribute `coefficients` of a task, as a dict.

    Raises:
        UsageError: it is not a mapping from names of heads to finite numbers.
    """
    found: Any = task.coefficients
    remedy = "make it a dict of numbers by head, such as {'depth': 0.5}"
    if not isinstance(found, Mapping):
        kind = "a method" if callable(found) else type(found).__name__
        raise UsageError(f"it is {kind}, not a dict", where="Task.coefficients", remedy=remedy)
    for head, value in found.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(f"the coefficient of head {head!r} is {value!r}", where="Task.coefficients", remedy=remedy)
    return {head: float(value) for head, value in found.items()}


def presenter(task: Task) -> Presenter:
    """The presenter of `task`.

    Raises:
        UsageError: `task.presenter` is not a class of presenters.
    """
    make: Any = task.presenter
    found = make(task) if callable(make) else make
    if not callable(make) or not isinstance(found, Presenter):
        remedy = "set it to a class: `presenter = MyPresenter`, where MyPresenter is a subclass of lockstep.Presenter"
        raise UsageError(f"it is {make!r}", where="Task.presenter", remedy=remedy)
    return found


def row(returned: Any, method: str) -> dict[str, Any]:
    """The value that a method of a presenter returned for a sample.

    Raises:
        UsageError: it is not a mapping.
    """
    if not isinstance(returned, Mapping):
        raise UsageError(_describe(returned), where=method, remedy="return a dict, such as {'prediction': 'cat'}")
    return dict(returned)


def rows(returned: Any) -> list[dict[str, Any]]:
    """The rows that `Presenter.rows` returned for a sample.

    Raises:
        UsageError: it is not a list of mappings.
    """
    if not isinstance(returned, list | tuple):
        raise UsageError(_describe(returned), where="Presenter.rows", remedy="return a list of dicts")
    return [row(one, "Presenter.rows") for one in returned]


def data(found: Any, where: str) -> Dataset[Any]:
    """Check that samples can be read from `found` in any order. Returns `found`.

    Args:
        where: method that returned `found`; for errors.

    Raises:
        UsageError: `found` is a loader, a stream, a class, or another object without length or index.
    """
    if isinstance(found, DataLoader):
        remedy = "return the data set, not a loader (it is loader.dataset): Lockstep makes the batches; "
        remedy += "lockstep --explain sampling says what a sampler becomes"
        raise UsageError(_describe(found), where=where, remedy=remedy)
    if isinstance(found, IterableDataset):
        remedy = (
            "return lockstep.Stream(data), which every rank reads whole (lockstep --explain streams); or write it into "
            "shards, once, with `lockstep shards FILE.py:FUNCTION OUT`: lockstep_recipes.Shards('OUT') reads by index "
            "(lockstep --explain shards)"
        )
        raise UsageError(f"{_describe(found)}, which is an IterableDataset", where=where, remedy=remedy)
    if forward(found) is not None and where != "Task.train_data":
        remedy = (
            "return a list of its samples: list(itertools.islice(samples, 1000)); or shards: lockstep --explain shards"
        )
        raise UsageError(f"{_describe(found)}, which has no samples by index", where=where, remedy=remedy)
    if isinstance(found, Mapping):
        names = ", ".join(repr(name) for name in list(found)[:5])
        remedy = f"return one of its data sets; or else {_MAP_STYLE.removeprefix('return ')}"
        raise UsageError(f"{_describe(found)} with the keys {names}", where=where, remedy=remedy)
    if found is None or inspect.isclass(found) or not hasattr(found, "__getitem__"):
        raise UsageError(_describe(found), where=where, remedy=_MAP_STYLE)
    try:
        len(found)
    except TypeError as error:
        raise UsageError(f"{_describe(found)}, which has no length", where=where, remedy=_MAP_STYLE) from error
    dataset: Dataset[Any] = found
    return dataset


def _describe(found: Any) -> str:
    """Describe a returned value in words."""
    if found is None:
        return "returned None"
    if inspect.isclass(found):
        return f"returned the class {found.__name__}, not an object of it"
    if isinstance(found, tuple | list):
        kinds = ", ".join(type(item).__name__ for item in found[:3])
        return f"returned a {type(found).__name__} of {kinds or 'nothing'}"
    name = type(found).__name__
    return f"returned {'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def schedule(task: Task) -> Callable[[int], float] | None:
    """`Task.schedule`, if the task has this method."""
    return None if is_default(task.schedule) else task.schedule
