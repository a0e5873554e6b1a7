"""A user's task without dropout, batch statistics and coarse rounding, so that its runs can be compared."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, TensorDataset

from lockstep.core import task_checks
from lockstep.core.data.dataset import member_of, name_of
from lockstep.core.defaults import is_default
from lockstep.core.task import Metrics, Task, loss_of_batch, needs_global_batch
from lockstep_lab.verify.draws import set_of_part
from lockstep_lab.verify.generators import disturb, states
from lockstep_lab.verify.reference.data import mapped, read

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass(frozen=True)
class TaskChanges:
    """The changes to a task that make two runs comparable."""

    exact: bool = False
    """No dropout, and BatchNorm with fixed statistics."""
    float64: bool = False
    """Model and inputs in float64."""
    reverse: bool = False
    """The samples of each micro-batch in reversed order: the same sums, rounded differently."""
    train_samples: int | None = None
    """This many training samples, evenly spread over the data set; None: all."""
    eval_samples: int | None = None
    """The same for evaluation samples."""
    no_augmentation: bool = False
    """Training samples are prepared as for evaluation, if they then have the form of training samples."""
    same_in_each_epoch: bool = False
    """Training samples are read and prepared once, in epoch 0, and stay the same. For a few samples."""
    note_generators: bool = False
    """The states of the global generators before each training loss are kept in `ComparableTask.generator_states`."""
    fixed_buffers: tuple[str, ...] = ()
    """Names of buffers that a forward pass changes, and that are restored after each pass."""
    disturb_generators: bool = False
    """The global generators get different states between reading a micro-batch and its forward pass."""


def _form(value: Any) -> Any:
    """The types in a sample, without sizes, which augmentation may change."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value), str(value.dtype), value.ndim
    if isinstance(value, Mapping):
        return type(value), {key: _form(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return type(value), [_form(item) for item in value]
    return type(value)


@final
class ComparableTask(Task):
    """`task` with `changes`, and otherwise the same.

    Methods that nothing changes are the task's own bound methods. The engine tests whether a method is the default, and
    so takes the same path as in training. For the same reason, batches become float64 where they are used, and not in
    `collate`.
    """

    def __init__(self, task: Task, changes: TaskChanges) -> None:
        self.task, self.changes, self.weight_calls = task, changes, 0
        self.generator_states: list[str] = []
        self.data: Any = None  # the task's training data
        self.presenter = lambda _: task.presenter(task)  # type: ignore[assignment]
        unchanged = ["setup", "calls_vary", "coefficients", "optimizer", "schedule", "tensor_plan"]
        prepares = changes.same_in_each_epoch or (changes.no_augmentation and not is_default(task.prepare))
        unchanged += [] if prepares else ["prepare"]
        unchanged += [] if changes.reverse else ["collate"]
        unchanged += [] if changes.float64 else ["metrics"]
        unchanged += [] if changes.float64 or changes.disturb_generators else ["weight"]
        unchanged += [] if changes.float64 or changes.exact or changes.fixed_buffers else ["predict"]
        changes_loss = changes.float64 or changes.exact or changes.fixed_buffers or changes.note_generators
        unchanged += [] if changes_loss else ["loss"]
        if task.players:
            unchanged += ["players", "followers", *([] if changes_loss else ["loss_of"])]
        unchanged += [] if changes_loss and needs_global_batch(task) else ["embed"]
        for name in unchanged:
            setattr(self, name, getattr(task, name))

    def model(self) -> nn.Module:
        model = task_checks.model(self.task)
        if self.changes.float64:
            model = model.double()
            for parameter in model.parameters():
                if parameter.is_complex():
                    parameter.data = parameter.data.to(torch.complex128)
        if self.changes.exact:
            disable_dropout(model)
            norms = batch_norm_modules(model)
            if norms and not any(parameter.is_meta for parameter in model.parameters()):
                self._estimate_statistics(model, norms)
            for norm in norms:
                freeze_statistics(norm)
        return model

    def _estimate_statistics(self, model: nn.Module, norms: Sequence[nn.Module]) -> None:
        """Give BatchNorm the statistics of up to eight samples. With those of a new model, activations may explode."""
        data = self.train_data()
        first = range(min(8, len(data)))  # type: ignore[arg-type]
        batch = self.collate(read(self, data, first, epoch=0, training=True, seed=0, skip=True))
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None  # type: ignore[assignment]  # None: the mean over all batches
        with torch.no_grad(), DropoutDisabled():
            loss_of_batch(self.task)(model.train(), self._converted(batch))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    def train_data(self) -> Dataset[Any]:
        self.data = self.task.train_data()
        data = _subset(self.data, self.changes.train_samples)
        return _Prepared(self, data) if self.changes.same_in_each_epoch else data

    def eval_data(self) -> Dataset[Any] | None:
        data = self.task.eval_data()
        return None if data is None else _subset(data, self.changes.eval_samples)

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        if isinstance(sample, _PreparedSample):
            return copy.deepcopy(sample.sample)  # `collate` may change it
        if not training or not self.changes.no_augmentation:
            return self.task.prepare(sample, epoch, training)
        as_trained = self.task.prepare(copy.deepcopy(sample), epoch, True)
        try:
            plain = self.task.prepare(sample, epoch, False)
        except Exception:  # evaluation samples may have a different form, and only then `prepare` has this branch
            return as_trained
        return plain if _form(plain) == _form(as_trained) else as_trained

    def collate(self, samples: list[Any]) -> Any:
        return self.task.collate(samples[::-1] if self.changes.reverse else samples)

    def weight(self, batch: Any) -> Any:
        if (
            self.changes.disturb_generators
        ):  # the engine calls no other method of the task between this and the forward pass
            self.weight_calls += 1
            disturb(self.weight_calls)
        return self.task.weight(self._converted(batch))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.changes.note_generators and model.training:
            text = repr(sorted(states().items()))
            self.generator_states.append(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        with self._without_dropout(), buffers_put_back(model, self.changes.fixed_buffers):
            return self.task.loss(model, self._converted(batch))

    def loss_of(self, name: str, model: nn.Module, batch: Any) -> Any:
        """The loss of an alternating optimizer, if the task has any."""
        with self._without_dropout(), buffers_put_back(model, self.changes.fixed_buffers):
            return self.task.loss_of(name, model, self._converted(batch))  # type: ignore[attr-defined]

    def embed(self, model: nn.Module, batch: Any) -> Any:
        with self._without_dropout(), buffers_put_back(model, self.changes.fixed_buffers):
            return self.task.embed(model, self._converted(batch))

    def predict(self, model: nn.Module, batch: Any) -> Any:
        with self._without_dropout():
            return self.task.predict(model, self._converted(batch))

    def metrics(self) -> Metrics | None:
        metrics, update = task_checks.metrics(self.task)
        if metrics is None:
            return None
        return Metrics(metrics, lambda collection, output, batch: update(collection, output, self._converted(batch)))

    def _converted(self, batch: Any) -> Any:
        return to_float64(batch) if self.changes.float64 else batch

    def _without_dropout(self) -> contextlib.AbstractContextManager[Any]:
        return DropoutDisabled() if self.changes.exact else contextlib.nullcontext()


def to_float64(batch: Any) -> Any:
    """`batch` with its floating-point tensors in float64, and its complex tensors in complex128."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return mapped(batch, convert)


@contextlib.contextmanager
def buffers_put_back(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, the buffers `names` are copies, so a forward pass changes the copies and not the buffers."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    buffers = [module.get_buffer(key) for module, key in places]
    for (module, key), buffer in zip(places, buffers, strict=True):
        setattr(module, key, buffer.clone())
    try:
        yield
    finally:
        for (module, key), buffer in zip(places, buffers, strict=True):
            setattr(module, key, buffer)


def batch_norm_modules(model: nn.Module) -> list[Any]:
    """The BatchNorm modules, whose results depend on which samples share a micro-batch."""
    return [module for module in model.modules() if isinstance(module, _BATCH_NORM)]


def freeze_statistics(norm: nn.Module) -> None:
    """Make BatchNorm use its running statistics, even if the model is put into training mode."""
    norm.eval()
    norm.train = types.MethodType(lambda self, mode=True: self, norm)  # type: ignore[method-assign]


def disable_dropout(model: nn.Module) -> int:
    """Set every dropout probability in `model` to zero: attributes such as `p`, `dropout`, `drop_prob`.

    Returns:
        The number of probabilities that were not zero.
    """
    count = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if is_probability and type(value) is float and value > 0:
                setattr(module, name, 0.0)
                count += 1
    return count


class DropoutDisabled(TorchFunctionMode):
    """Inside, the dropout functions of torch drop nothing."""

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
        if func is functional.multi_head_attention_forward:  # torch disables this mode inside that function
            args = [*args[:10], 0.0, *args[11:]] if len(args) > 10 else args
            options |= {} if len(args) > 10 else {"dropout_p": 0.0}
        return func(*args, **options)


class _Subset(Dataset[Any]):
    """Some samples of a data set, with the attributes that the engine may use: `lengths`, `__getitems__`, `where`."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data, self.indices = data, indices
        lengths = member_of(data, "lengths")
        self.lengths = None if lengths is None else np.asarray(lengths)[list(indices)]
        set_of_part(self, data, indices)
        if member_of(data, "__getitems__") is not None:
            self.__getitems__ = self._get_many

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]

    def _get_many(self, indices: Sequence[int]) -> Any:
        return self.data.__getitems__([self.indices[index] for index in indices])

    def where(self, index: int) -> str:
        """The name of a sample, for error messages."""
        return name_of(self.data, self.indices[index])


@dataclass(frozen=True)
class _PreparedSample:
    """The result of a task for a raw sample."""

    sample: Any


class _Prepared(Dataset[Any]):
    """All samples of a small data set, read and prepared in epoch 0."""

    def __init__(self, task: ComparableTask, data: Any) -> None:
        self.samples = read(task, data, range(len(data)), epoch=0, training=True, seed=0, skip=True)
        self.lengths = member_of(data, "lengths") if len(self.samples) == len(data) else None
        set_of_part(self, data, range(len(self.samples)))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return _PreparedSample(self.samples[index])


def _subset(data: Any, count: int | None) -> Dataset[Any]:
    """`count` samples, evenly spread, because data sets are often sorted by class.

    A part of a `TensorDataset` is a `TensorDataset`, which the engine reads differently from other data sets.
    """
    length = len(data)
    if count is None or count >= length:
        return data  # type: ignore[no-any-return]
    indices = [number * length // count for number in range(count)]
    if type(data) is TensorDataset:
        part = TensorDataset(*(tensor[indices] for tensor in data.tensors))
        lengths = member_of(data, "lengths")
        if lengths is not None:
            part.lengths = np.asarray(lengths)[indices]  # type: ignore[attr-defined]
        set_of_part(part, data, indices)
        return part
    return _Subset(data, indices)


def sum_of_heads(losses: Any) -> Tensor:
    """The sum over the heads of a loss, in the number format of the first head."""
    heads = list(losses.values()) if isinstance(losses, Mapping) else [losses]
    total: Tensor = heads[0]
    for loss in heads[1:]:
        total = total + loss
    return total
