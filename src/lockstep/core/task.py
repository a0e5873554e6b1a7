"""The contract between a task and the engine: what a user writes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from lockstep.core import devices, keywords
from lockstep.core.defaults import default, is_default
from lockstep.core.errors import TrainingError, UsageError
from lockstep.core.presenter import Presenter

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    MetricsUpdate = Callable[[MetricCollection, Any, Any], None]


class Indexed(Protocol):
    """The methods that a list, an array of NumPy and a data set of `datasets` have in common."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Samples = Dataset[Any] | Indexed
"""Samples by index: a map-style data set of torch, or a list."""
Batch = Any
Losses = dict[str, Tensor]


def update_from_pair(metrics: MetricCollection, output: Any, batch: Batch) -> None:
    """Feed a batch to the metrics. This is for batches that are (input, target) pairs.

    Raises:
        TrainingError: the batch is not a pair, or the metrics cannot take the output and the target.
    """
    try:
        metrics.update(output, batch[1])
    except Exception as error:
        if devices.Device.is_shortage(error):
            raise
        raise TrainingError(
            f"update(output of predict, batch[1]) failed: {type(error).__name__}: {error}",
            where="Task.metrics",
            remedy="return lockstep.Metrics(metrics, update) from Task.metrics, where update(metrics, output, batch) "
            "feeds the metrics differently; or change what predict returns",
        ) from error


@keywords.of_class
@dataclass(frozen=True)
class Metrics:
    """Metrics, and how a batch is fed to them. `Task.metrics` may return this."""

    metrics: MetricCollection | Metric | Mapping[str, Metric | MetricCollection]
    """torchmetrics objects on the CPU. Lockstep moves them to the device. They see every evaluation sample once. Copies
    of them see every training sample once in each window of the log, if `Task.loss` returns outputs."""
    update: MetricsUpdate = update_from_pair
    """Called with (metrics, output of `predict`, batch) for each batch. `metrics` is always a MetricCollection."""


class Task(abc.ABC):
    """A model, its data, its loss and its metrics, for one process on one device.

    A task has no code for ranks, devices, precision or gradient accumulation. `model`, `train_data` and `loss` must be
    written. Everything else has a default. The constructor takes the keys of the config's `task` section.

    A checkpoint holds the `state_dict` of the model, and nothing of the task. What training changes, and later steps
    depend on, belongs into parameters, buffers (`register_buffer`) or `get_extra_state` of the model. No method changes
    its argument in place if that is a sample of the data set: `prepare` and `collate` change copies.
    """

    coefficients: Mapping[str, float] = MappingProxyType({})
    """Factor of each head's mean in the total loss. Heads that are not named have the factor 1."""

    calls_vary: bool = False
    """Evaluations and predictions call the model more often for some batches than for others, such as once for each
    size of images. With FSDP, the blocks of the model then stay gathered on each rank until the evaluation ends."""

    frozen_epochs: Mapping[str, int] = MappingProxyType({})
    """Epochs by pattern over names of parameters, with `*` and `?`: the task relies on these parameters being frozen in
    the first epochs. A config that trains them earlier is an error."""

    players: Sequence[Any] = ()
    """Players that update in turn; see `lockstep.AlternatingTask`."""

    presenter: type[Presenter] = Presenter
    """The class that shows samples, outputs and results to people."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if callable(cls.coefficients):
            raise UsageError(
                "it is a method, but must be an attribute",
                where=f"{cls.__name__}.coefficients",
                remedy="write `coefficients = {'depth': 0.5}` in the class, or put @property above the method",
            )

    # ---- the parts

    def setup(self, folder: Path, trained: bool) -> None:  # noqa: B027 - the default does nothing
        """Called before every other method if the task belongs to a run: on rank 0 first, then on the other ranks.

        Args:
            folder: is kept with the run. Store there what the task learns from its data (label names, a vocabulary).
            trained: whether a checkpoint provides the weights.
        """

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A new model. The random number generators are seeded before, so that all ranks make the same weights."""

    @abc.abstractmethod
    def train_data(self) -> Samples:
        """The raw training samples: a map-style data set (`len(data)` and `data[index]`).

        It may have more members, such as `lengths`, `order` and `where`: lockstep --explain data_sets. With
        `check_first` that is true, its method `check(index)` is called for all samples before a new run trains, on all
        ranks at the same time, each for its share.
        """

    def eval_data(self) -> Samples | None:
        """The raw evaluation samples: a map-style data set, or None if there are none."""
        return None

    # ---- from a sample to a batch; these methods run in loader workers

    @default
    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        """Turn a raw sample into an item for `collate`.

        Random numbers (torch, NumPy, random) that are drawn here depend on (seed, epoch, sample) only.
        """
        return sample

    @default
    def collate(self, samples: list[Any]) -> Batch:
        """Turn a list of prepared samples into a batch."""
        if set(map(type, samples)) == {tuple} and len(set(map(len, samples))) == 1:
            # As torch does it, without a generator for each sample.
            return [default_collate(list(column)) for column in zip(*samples, strict=True)]
        return default_collate(samples)

    @default
    def weight(self, batch: Batch) -> Tensor | float | Mapping[str, Tensor | float] | None:
        """The number of units that the loss of this batch sums over (valid labels, tokens, pixels, boxes).

        It is computed only from the labels. A task with several heads returns a dict with a number for each head.
        None, the default, means that the unit is the sample.
        """
        return None

    # ---- how the model is split

    def tensor_plan(self) -> Mapping[str, str] | None:
        """How `parallel.tensor` cuts the layers of the model over ranks: by pattern over names of modules, `colwise` or
        `rowwise`, such as `{"layers.*.up": "colwise", "layers.*.down": "rowwise"}`.
        lockstep --explain mesh has all styles.
        A wrong plan trains a different model without an error: run `lockstep verify` first.

        None, the default: the plan that a model of transformers brings along.
        """
        return None

    # ---- how the parameters learn

    @default
    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        """An optimizer of the task's own: any `torch.optim.Optimizer`. None, the default: the config's `optim.name`.

        Args:
            groups: all parameters of the model, in the groups of `optim.groups`: each a dict with `params`, `name` and,
                if the config sets them, `lr` and `weight_decay`. The optimizer gets all of them, in these groups or
                in others.

        The schedule multiplies the learning rates. `step` takes no closure. A checkpoint holds the optimizer's `state`
        by parameter (tensors, numbers, texts), and what it changes in its groups.
        """
        return None

    @default
    def schedule(self, update: int) -> float:
        """The factor on all learning rates, as a pure function of the updates so far. By default, the config's
        `schedule.name` decides."""
        raise NotImplementedError  # a task without this method

    # ---- from a batch to a loss and an output

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses | tuple[Tensor | Losses, Any]:
        """The SUM of the loss over the units that `weight` counts: a scalar tensor, or a dict of scalar tensors by
        head.

        It may also return a tuple (loss, output), where `output` is the result of `predict` for this batch. Then an
        evaluation with metrics needs no second forward pass, and the log has the metrics of the training, too:
        `train/accuracy` next to `train/loss`. While the model trains, no gradient flows through `output`: detach what
        it is computed from, so that nothing is kept for a backward pass.
        """

    @default
    def embed(self, model: nn.Module, batch: Batch) -> Any:
        """The outputs that the loss needs from all samples of the global batch, such as embeddings.

        Tensors with the batch as first dimension, or a dict, tuple or list of them. They are gathered over ranks and
        micro-batches, in the same order on all ranks, and `loss` gets them instead of a batch. Gradients
        flow through tensors of floating-point numbers. Then evaluations have no loss, only metrics: the loss depends
        on which samples are in one batch. By default, `loss` gets one micro-batch at a time.
        """
        return batch

    @default
    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """The outputs for metrics and users: tensors with the batch as first dimension, or a dict, tuple or list of
        them."""
        raise UsageError(
            f"{type(self).__name__} has no predict",
            where="Task.predict",
            remedy="write this method: predictions and metrics need outputs",
        )

    def metrics(self) -> MetricCollection | Metric | Mapping[str, Metric | MetricCollection] | Metrics | None:
        """torchmetrics objects for the evaluation and for the log of the training, or None.

        By default, metrics are fed with `update(output, batch[1])`. For batches that are not (input, target) pairs,
        return `lockstep.Metrics(metrics, update)`.
        """
        return None


def needs_global_batch(task: Task) -> bool:
    """True if the loss needs all samples of the global batch: the task has a method `embed`."""
    return not is_default(task.embed)


def loss_of_batch(task: Task) -> Callable[[nn.Module, Batch], Any]:
    """A function that gives what `Task.loss` returns for a batch by itself, as if it were the global batch."""
    return lambda model, batch: task.loss(model, task.embed(model, batch))


# Methods of a Presenter. A task may have methods with these names for itself.
_OF_PRESENTER = (
    "describe",
    "truth",
    "show",
    "report",
    "mistakes",
    "pictures",
    "files",
    "rows",
    "log_header",
    "notes",
    "export",
)


def methods_not_called(task: Task) -> list[str]:
    """A note for the log, if a task without a presenter has methods that only a presenter's class should have."""
    names = [name for name in _OF_PRESENTER if callable(getattr(task, name, None))]
    if not names or task.presenter is not Presenter:
        return []
    listed = ", ".join(names)
    return [
        f"note: Lockstep does not call {type(task).__name__}'s {listed}; a lockstep.Presenter may have such methods"
    ]
