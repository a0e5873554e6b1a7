"""The task of a `Loop`: the user's model, optimizer and data, as the engine needs them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.core.caller import NOT_IN_A_LOOP
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError, listed
from lockstep.core.optimizer_class import Optimizers
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.wrapped_model import without_wrappers
from lockstep.core.task import Batch, Losses, Metrics, Samples, Task
from lockstep.sampling.weighted import WeightedSampler
from lockstep.updates.players import Player

Units = Callable[[Any], Any]
"""From a batch to its number of units; see `Task.weight`."""


class LoopTask(Task):
    """A task whose losses are computed elsewhere: by the body of the user's loop.

    Args:
        module: the user's model.
        optimizer: of its parameters.
        data: map-style training data.
        several: the optimizers that make up `optimizer`, by name. They update in turn.
        collate: None: torch's `default_collate`.
        units: None: the body of the loop says how many units a micro-batch has.
    """

    followers = ()

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        data: Samples,
        *,
        several: Mapping[str, Optimizer] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        units: Units | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            remedy = "give a torch.nn.Module as the first argument"
            raise UsageError(f"the model is a {type(module).__name__}", where="Loop(model, ...)", remedy=remedy)
        if not isinstance(optimizer, Optimizer):
            remedy = "give a torch.optim.Optimizer over the model's parameters as the second argument"
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}", where="Loop(model, optimizer)", remedy=remedy
            )
        module = without_wrappers(module, "Loop(model, ...)")
        self._module, self._data = module, data
        self._given = weakref.ref(optimizer)  # sharding refuses tasks that hold parameters
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._held = [[self._name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        self._check_trainable()
        if several:
            self.players = tuple(Player(name, self._names_of(one)) for name, one in several.items())
        if collate is not None and collate is not default_collate:
            self.collate = collate  # type: ignore[method-assign, assignment]
        if units is not None:
            self.weight = units  # type: ignore[method-assign, assignment]

    def _name_of(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            raise UsageError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have",
                where="Loop(model, optimizer)",
                remedy="make the optimizer of model.parameters(), after the model is complete; put the parameters of a "
                "loss or of a second model into the same module, such as nn.ModuleDict({'net': net, 'head': head})",
            )
        return self._names[id(parameter)]

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        return [self._name_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]

    def _check_trainable(self) -> None:
        held = {name for group in self._held for name in group}
        missing = [n for n, p in self._module.named_parameters() if p.requires_grad and n not in held]
        if missing:
            raise UsageError(
                f"the optimizer lacks parameters of the model that require a gradient: {listed(missing, 5)}",
                where="Loop(model, optimizer)",
                remedy="give them to the optimizer, or freeze them with requires_grad_(False)",
            )
        frozen = [n for n, p in self._module.named_parameters() if n not in held]
        self._held[0] += frozen  # checkpoints ask for each parameter; without a gradient none is updated

    def model(self) -> nn.Module:
        return self._module

    def train_data(self) -> Samples:
        return self._data

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The user's optimizer, over the parameters as they are now: FSDP puts sharded ones in their places."""
        by_name = dict(self._module.named_parameters())
        given = self._given()
        assert given is not None  # the loop holds it
        old = {id(parameter) for group in given.param_groups for parameter in group["params"]}
        moved = [name for group in self._held for name in group if id(by_name[name]) not in old]
        if given.state and any(by_name[name].requires_grad for name in moved):
            raise UsageError(
                "the optimizer has made updates before, and FSDP shards the parameters that its state belongs to",
                where="Loop(model, optimizer), parallel.strategy=fsdp",
                remedy="make the optimizer right before the Loop, or use strategy='ddp'",
            )
        for group, names in zip(given.param_groups, self._held, strict=True):
            group["params"] = [by_name[name] for name in names]
        return given

    def loss(self, model: nn.Module, batch: Batch) -> Losses | Tensor:
        if self.players:
            return {player.name: zero_loss(model) for player in self.players}
        return zero_loss(model)

    def loss_of(self, name: str, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a player."""
        return zero_loss(model)


def zero_loss(model: nn.Module) -> Tensor:
    """A loss of zero that depends on each trainable parameter. Its gradients are zeros."""
    sums = [local(parameter).sum() * 0.0 for parameter in model.parameters() if parameter.requires_grad]
    total = sums[0].float()
    for value in sums[1:]:
        total = total + value
    return total


class LoopEvaluation(Task):
    """The task of an evaluation in a loop: metrics, and no loss.

    Args:
        predict: from the inputs of a batch to the model's output; see `Loop.evaluate`.
    """

    def __init__(self, task: LoopTask, metrics: Any, predict: Callable[[Any], Any]) -> None:
        self._task, self._metrics, self._predict = task, metrics, predict
        self.collate = task.collate  # type: ignore[method-assign]

    def model(self) -> nn.Module:
        return self._task.model()

    def train_data(self) -> Samples:
        return self._task.train_data()

    def embed(self, model: nn.Module, batch: Batch) -> Any:
        """Never called. A task that has this method has no loss of a batch by itself."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Losses | Tensor:
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        return self._predict(batch[0] if _is_pair(batch) else batch)

    def metrics(self) -> Metrics:
        def update(metrics: Any, output: Any, batch: Batch) -> None:
            if _is_pair(batch):
                metrics.update(output, batch[1])
            else:
                metrics.update(*output)

        return Metrics(self._metrics, update)


def _is_pair(batch: Batch) -> bool:
    return isinstance(batch, list | tuple) and len(batch) == 2


def joined(model: Any, optimizers: Mapping[str, Any], refused: Mapping[str, Any]) -> tuple[Any, Optimizer]:
    """Several models as one, and several optimizers as one.

    Args:
        refused: arguments of the Loop that are for one optimizer.

    Raises:
        UsageError: something is not an optimizer, two optimizers have the same parameter, or such an argument is set.
    """
    where = "Loop(models, {name: optimizer, ...})"
    for name, value in refused.items():
        if value is not None:
            remedy = {"units": "say it to step.backward(loss, units=n)", "scheduler": "call its step() in the body"}[
                name
            ]
            raise UsageError(f"{name}= is for one optimizer", where=where, remedy=f"leave it out, and {remedy}")
    module = nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else model
    other = next((one for one in optimizers.values() if not isinstance(one, Optimizer)), None)
    if other is not None or not optimizers:
        remedy = "give a torch.optim.Optimizer by each name"
        raise UsageError(f"an optimizer is a {type(other).__name__}", where=where, remedy=remedy)
    held = [id(parameter) for one in optimizers.values() for group in one.param_groups for parameter in group["params"]]
    if len(set(held)) < len(held):
        remedy = "give each optimizer its own parameters"
        raise UsageError("two optimizers have the same parameter", where=where, remedy=remedy)
    for name, one in optimizers.items():
        for group in one.param_groups:
            group.setdefault("name", name)  # of its rate in the log
    return module, Optimizers(list(optimizers.values()))


class FromLoader(NamedTuple):
    """The training data, and what a user's DataLoader says about them."""

    data: Any
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int | None = None
    workers: int | None = None
    drop_last: bool = False


def from_loader(given: Any, *, ordered: bool = True) -> FromLoader:
    """The data set of a DataLoader with its batch size, workers and `collate_fn`. A data set stays as it is, and
    tensors become one.

    Args:
        ordered: whether the order of the samples matters, as in training.

    Raises:
        UsageError: the loader has a setting that cannot be kept; names it.
    """
    if isinstance(given, tuple) and given and all(isinstance(one, Tensor) for one in given):
        return FromLoader(TensorDataset(*given))
    if not isinstance(given, DataLoader):
        _check_data(given)
        return FromLoader(given)
    _check_data(given.dataset)
    if not ordered:
        return FromLoader(given.dataset, given.collate_fn)
    where, data = "the DataLoader of Loop", given.dataset
    if given.batch_size is None:
        kind = type(given.batch_sampler).__name__ if isinstance(given.batch_sampler, BatchSampler) else "its sampler"
        remedy = (
            "give batch_size, or the data set itself with global_batch=; an attribute `order` of the data set chooses "
        )
        raise UsageError(
            f"{kind} makes its batches", where=where, remedy=f"{remedy}the samples: lockstep --explain sampling"
        )
    if given.worker_init_fn is not None:
        remedy = "leave it out: Lockstep seeds torch, NumPy and random before each sample"
        raise UsageError("it has a worker_init_fn", where=where, remedy=remedy)
    if isinstance(given.sampler, WeightedRandomSampler):
        if not given.sampler.replacement:
            remedy = "use replacement=True, or no weights"
            raise UsageError("its WeightedRandomSampler draws without replacement", where=where, remedy=remedy)
        data.order = WeightedSampler(given.sampler.weights, given.sampler.num_samples)  # type: ignore[attr-defined]
    elif type(given.sampler) is not RandomSampler or given.sampler.replacement:
        kind = type(given.sampler).__name__
        remedy = "use shuffle=True: Lockstep shuffles by (seed, epoch). An attribute `order` of the data set chooses "
        remedy += "another order: lockstep --explain sampling"
        raise UsageError(f"its order of samples is that of a {kind}", where=where, remedy=remedy)
    return FromLoader(data, given.collate_fn, given.batch_size, given.num_workers, given.drop_last)


def _check_data(data: Any) -> None:
    if isinstance(data, IterableDataset):
        remedy = "wrap it: lockstep.Stream(dataset, ...) gives positions to its samples: lockstep --explain streams"
        raise UsageError("it is an IterableDataset", where="the training data of Loop", remedy=remedy)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with dotted paths, such as `{"checkpoint.every_steps": 100}`, as nested mappings."""
    found: dict[str, Any] = {}
    for path, value in dotted.items():
        *sections, key = path.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        if isinstance(value, Mapping) and isinstance(place.get(key), dict):
            place[key] |= value
        else:
            place[key] = dict(value) if isinstance(value, Mapping) else value
    return found


def check_keys(config: RunConfig) -> None:
    """Check that no key asks for what needs the loss of a task, or the learning rate of the config.

    Raises:
        UsageError: names the key.
    """
    train, optim = config.train, config.optim
    others = optim.model_copy(update={"clip_norm": type(optim)().clip_norm})
    is_set = {
        "watch.every": bool(config.watch.every),
        "parallel.tensor": config.parallel.tensor > 1,
        "schedule": config.schedule != type(config.schedule)(),
        "train.eval_every_epochs": bool(train.eval_every_epochs),
        "train.eval_every_steps": bool(train.eval_every_steps),
        "train.stop_when": bool(train.stop_when),
        "checkpoint.keep_best": config.checkpoint.keep_best is not None,
        "optim": others != type(optim)(),
    }
    for key in filter(is_set.__getitem__, is_set):
        remedy = next(advice for start, advice in NOT_IN_A_LOOP.items() if key.startswith(start))
        raise UsageError("a Loop cannot use this key", where=f"Loop(config=...), {key}", remedy=remedy)


def write_weights(whole: Mapping[str, Any], path: Path) -> None:
    """Write a file as `torch.save` does: it is whole, or it is not there.

    Raises:
        UsageError: it cannot be written.
    """
    staged = Path(f"{path}.{os.getpid()}")
    try:
        staged.parent.mkdir(parents=True, exist_ok=True)  # for a missing folder, torch raises no OSError
        torch.save(whole, staged)
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        what = f"cannot be written: {error.strerror}"
        raise UsageError(what, where=str(path), remedy="give a place where you can write") from error
