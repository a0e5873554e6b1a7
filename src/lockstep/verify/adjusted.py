"""A user's task with its randomness, its batch statistics and its rounding taken out, so that runs can be compared."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, TensorDataset

from lockstep.data.loader import MicroBatches, is_default, map_tensors
from lockstep.engine import task_checks
from lockstep.engine.step import SAMPLES
from lockstep.tasks.task import Metrics, Task
from lockstep.verify.generators import disturb

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class Adjustment:
    """What is changed in a task.

    exact: no dropout, BatchNorm with fixed statistics. double: float64 model and inputs. reverse: the samples of a
    micro-batch in reversed order: the same sums, rounded in another way. part: this many training samples, evenly spread over
    the data set. eval_part: the same for evaluation. plain: training samples are prepared as for evaluation. disturb: between
    reading a micro-batch and its forward pass, the global generators are put into other states.
    """

    exact: bool = False
    double: bool = False
    reverse: bool = False
    part: int | None = None
    eval_part: int | None = None
    plain: bool = False
    disturb: bool = False


@final
class Adjusted(Task):
    """`task` as `adjustment` says; in all else the same.

    What is not adjusted is the task's own bound method, so that the engine, which asks whether a method is the default, goes
    the way with it that it goes in training. For this, batches are turned into float64 where they are used, not in `collate`.
    """

    def __init__(self, task: Task, adjustment: Adjustment) -> None:
        self.task, self.how, self.weighed = task, adjustment, 0
        self.presenter = lambda _: task.presenter(task)  # type: ignore[assignment]
        unchanged = ["setup", "coefficients"]
        unchanged += [] if adjustment.plain and not is_default(task.prepare) else ["prepare"]
        unchanged += [] if adjustment.reverse else ["collate"]
        unchanged += [] if adjustment.double else ["metrics"]
        unchanged += [] if adjustment.double or adjustment.disturb else ["weight"]
        unchanged += [] if adjustment.double or adjustment.exact else ["loss", "predict"]
        for name in unchanged:
            setattr(self, name, getattr(task, name))

    def model(self) -> nn.Module:
        model = self.task.model()
        if self.how.double:
            model = model.double()
        if self.how.exact:
            silence(model)
            norms = batch_norms(model)
            if norms and not any(parameter.is_meta for parameter in model.parameters()):
                self._settle(model, norms)
            for norm in norms:
                fix(norm)
        return model

    def _settle(self, model: nn.Module, norms: Sequence[nn.Module]) -> None:
        """Give BatchNorm the statistics of some samples: with those of a new model, activations of deep networks explode."""
        data = self.train_data()
        batch = self.collate(readable(MicroBatches(data, self, 0, True, "skip"), range(min(8, len(data))), 0))  # type: ignore[arg-type]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None  # type: ignore[assignment] # the mean over what is seen
        with torch.no_grad(), Silenced():
            self.task.loss(model.train(), self._converted(batch))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    def train_data(self) -> Dataset[Any]:
        return _part(self.task.train_data(), self.how.part)

    def eval_data(self) -> Dataset[Any] | None:
        data = self.task.eval_data()
        return None if data is None else _part(data, self.how.eval_part)

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        return self.task.prepare(sample, epoch, training and not self.how.plain)

    def collate(self, samples: list[Any]) -> Any:
        return self.task.collate(samples[::-1] if self.how.reverse else samples)

    def weight(self, batch: Any) -> Any:
        if self.how.disturb:  # this is the last that the engine asks for before the forward pass
            self.weighed += 1
            disturb(self.weighed)
        return self.task.weight(self._converted(batch))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        with self._silenced():
            return self.task.loss(model, self._converted(batch))

    def predict(self, model: nn.Module, batch: Any) -> Any:
        with self._silenced():
            return self.task.predict(model, self._converted(batch))

    def metrics(self) -> Metrics | None:
        metrics, update = task_checks.metrics(self.task)
        if metrics is None:
            return None
        return Metrics(metrics, lambda collection, output, batch: update(collection, output, self._converted(batch)))

    def _converted(self, batch: Any) -> Any:
        return in_double(batch) if self.how.double else batch

    def _silenced(self) -> contextlib.AbstractContextManager[Any]:
        return Silenced() if self.how.exact else contextlib.nullcontext()


def readable(chunks: MicroBatches, indices: Iterable[int], epoch: int) -> list[Any]:
    """Samples, without those that cannot be read where the config skips them."""
    samples = []
    for index in indices:
        try:
            samples.append(chunks.sample(int(index), epoch))
        except Exception:
            if chunks.on_error == "raise":
                raise
    return samples


def in_double(batch: Any) -> Any:
    """`batch` with its floating-point tensors in float64."""
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def batch_norms(model: nn.Module) -> list[Any]:
    """Modules whose result depends on which samples share a micro-batch."""
    return [module for module in model.modules() if isinstance(module, _BATCH_NORM)]


def fix(norm: nn.Module) -> None:
    """Leave BatchNorm its running statistics, whatever mode the model is put into."""
    norm.eval()
    norm.train = types.MethodType(lambda self, mode=True: self, norm)  # type: ignore[method-assign]


def silence(model: nn.Module) -> int:
    """Set every dropout probability in `model` to zero: attributes such as `p`, `dropout`, `drop_prob`. How many there were."""
    found = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if (
                ("drop" in name or (name == "p" and "Drop" in type(module).__name__))
                and type(value) is float
                and value > 0
            ):
                setattr(module, name, 0.0)
                found += 1
    return found


class Silenced(TorchFunctionMode):
    """Turns dropout off where a model calls it as a function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS and func in (getattr(functional, name, None), getattr(torch, name, None)):
            return args[0] if args else options["input"]
        if func is functional.scaled_dot_product_attention:
            args = [*args[:4], 0.0, *args[5:]] if len(args) > 4 else args
            options |= {} if len(args) > 4 else {"dropout_p": 0.0}
        if func is functional.multi_head_attention_forward:  # inside of which this mode is off
            args = [*args[:10], 0.0, *args[11:]] if len(args) > 10 else args
            options |= {} if len(args) > 10 else {"dropout_p": 0.0}
        return func(*args, **options)


class _Part(Dataset[Any]):
    """Some samples of a data set, with what the engine asks of it."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data, self.indices = data, indices
        lengths = getattr(data, "lengths", None)
        self.lengths = None if lengths is None else np.asarray(lengths)[list(indices)]
        if hasattr(data, "__getitems__"):
            self.__getitems__ = self._many

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]

    def _many(self, indices: Sequence[int]) -> Any:
        return self.data.__getitems__([self.indices[index] for index in indices])

    def where(self, index: int) -> str:
        """Name of the sample."""
        named = getattr(self.data, "where", None)
        return str(named(self.indices[index])) if named else f"{type(self.data).__name__}[{self.indices[index]}]"


def _part(data: Any, count: int | None) -> Dataset[Any]:
    """`count` samples, evenly spread: data sets are often sorted by class. Tensors stay tensors, which the engine reads in another way."""
    length = len(data)
    if count is None or count >= length:
        return data  # type: ignore[no-any-return]
    indices = [number * length // count for number in range(count)]
    if type(data) is TensorDataset:
        return TensorDataset(*(tensor[indices] for tensor in data.tensors))
    return _Part(data, indices)


def total(losses: Any) -> Tensor:
    """The sum over heads, where there are several."""
    heads = list(losses.values()) if isinstance(losses, Mapping) else [losses]
    added: Tensor = heads[0]  # in its own number format
    for loss in heads[1:]:
        added = added + loss
    return added


def units_of(task: Task, batches: Sequence[tuple[Any, int]]) -> dict[str, float]:
    """W by head of batches with their sizes, or under `SAMPLES` for all heads where the unit is the sample or there is one head."""
    units: dict[str, float] = {}
    for batch, size in batches:
        weight = task.weight(batch)
        for head, value in (
            weight if isinstance(weight, Mapping) else {SAMPLES: size if weight is None else weight}
        ).items():
            units[head] = units.get(head, 0.0) + float(value)
    return units
