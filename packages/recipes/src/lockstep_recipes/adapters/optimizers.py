"""Turn the result of `configure_optimizers` into one optimizer and a learning rate factor per update."""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.core.foreign_task import Keys, refused

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "name", "base_lr", "params")


def parse(returned: Any, where: str) -> tuple[torch.optim.Optimizer, dict[str, Any] | None]:
    """The optimizer, and its scheduler in Lightning's form, a dict with `scheduler`, `interval` and `frequency`.

    Args:
        returned: an optimizer, a list of one, a pair of lists, or a dict with `optimizer` and `lr_scheduler`.
        where: the line of `configure_optimizers`.

    Raises:
        UsageError: there is none, or there are several.
    """
    schedulers: Any = []
    monitor = "NAME"
    if isinstance(returned, Mapping):
        optimizers, schedulers = [returned["optimizer"]], [returned.get("lr_scheduler")]
        monitor = returned.get("monitor", monitor)
    elif isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], tuple | list):
        optimizers, schedulers = list(returned[0]), returned[1]
    elif isinstance(returned, tuple | list):
        optimizers = list(returned)
        if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
            return parse(optimizers[0], where)
    else:
        optimizers = [returned]
    schedulers = [one for one in (schedulers if isinstance(schedulers, tuple | list) else [schedulers]) if one]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        what = f"it returns {len(optimizers)} optimizers" if len(optimizers) > 1 else f"it returns {optimizers[0]!r}"
        raise refused(what, where, "return one optimizer; for alternating optimizers see lockstep --explain players")
    if len(schedulers) > 1:
        remedy = "chain them: torch.optim.lr_scheduler.SequentialLR"
        raise refused(f"it returns {len(schedulers)} schedulers", where, remedy)
    if not schedulers:
        return optimizers[0], None
    one = dict(schedulers[0]) if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    if isinstance(one["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
        found = one["scheduler"]
        keys = f"{{metric: eval/{one.get('monitor', monitor)}, mode: {found.mode}, patience: {found.patience}, factor: "
        keys += f"{found.factors[0] if hasattr(found, 'factors') else found.factor}, min_delta: {found.threshold}}}"
        remedy = f"return only the optimizer, and set schedule.name=plateau schedule.plateau='{keys}'; min_delta is "
        remedy += "absolute there"
        raise refused("ReduceLROnPlateau follows results, so it is not a function of the update", where, remedy)
    return optimizers[0], {"interval": "epoch", "frequency": 1, **one}


class LearningRateFactors:
    """The factor on all learning rates after each number of updates, read from a torch scheduler. A copy of the
    scheduler steps ahead of training on groups without parameters, so none of its state is saved."""

    serve: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Within the context it returns, functions of the scheduler may ask the module for its trainer."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Keys, where: str, module: Any = None) -> None:
        """
        Args:
            optimizer: as `configure_optimizers` returned it, with its scheduler made and not stepped.
            config: of `parse`.
            module: the module that functions of the scheduler may query.
        """
        self.where, self.interval, self.frequency = where, str(config["interval"]), int(config["frequency"])
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        stand_in: Any = types.SimpleNamespace(param_groups=copy.deepcopy(groups), step=_Step(), _opt_called=True)
        stand_in.defaults, stand_in.state = dict(optimizer.defaults), {}
        memo: dict[int, Any] = {id(optimizer): stand_in, id(module): module}
        self.scheduler, self.groups = copy.deepcopy(config["scheduler"], memo), stand_in.param_groups
        self.first = [float(group.get("initial_lr", group["lr"])) for group in self.groups]
        self.other = self._others()
        self.factors = [self._factor()]

    def check_frequency(self, accumulated: int) -> None:
        """Raises UsageError if Lightning would count batches rather than updates."""
        if self.interval == "step" and self.frequency > 1 and accumulated > 1:
            what = f"the scheduler has frequency={self.frequency} by step, with accumulate_grad_batches={accumulated}"
            raise refused(what, self.where, "remove frequency, and let the scheduler count updates")

    def after(self, steps: int) -> float:
        """The factor after so many steps of the scheduler."""
        while len(self.factors) <= steps:
            with warnings.catch_warnings(), self.serve():
                warnings.simplefilter("ignore")
                try:
                    self.scheduler.step()
                except (ValueError, ArithmeticError, LookupError) as error:
                    remedy = "make it as long as the run: self.trainer.estimated_stepping_batches"
                    raise refused(f"step {len(self.factors)} of the scheduler: {error}", self.where, remedy) from error
            self.factors.append(self._factor())
        return self.factors[steps]

    def at(self, update: int, steps_per_epoch: int) -> float:
        """The factor of an update, counted from 0."""
        epochs, within = divmod(update, max(1, steps_per_epoch))
        if self.interval != "step":
            return self.after(epochs // self.frequency)
        # Lightning counts batches from 0 in each epoch.
        return self.after(epochs * (steps_per_epoch // self.frequency) + within // self.frequency)

    def _factor(self) -> float:
        if self._others() != self.other:
            remedy = "give it cycle_momentum=False"
            raise refused("the scheduler changes more than the learning rate", self.where, remedy)
        factors = [
            float(group["lr"]) / first if first else 1.0 for group, first in zip(self.groups, self.first, strict=True)
        ]
        if max(factors) - min(factors) > 1e-9 * max(map(abs, factors)):
            remedy = "use one function for all groups"
            raise refused("the scheduler has a different factor for each group", self.where, remedy)
        return factors[0]

    def _others(self) -> list[dict[str, Any]]:
        numbers = (int, float, tuple, list)
        return [
            {key: value for key, value in group.items() if key not in _RATES and isinstance(value, numbers)}
            for group in self.groups
        ]


class _Step:
    """Replaces the method `step` of an optimizer, which torch schedulers inspect."""

    _wrapped_by_lr_sched = True

    def __call__(self) -> None:
        pass


def with_all(optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with the first rates of its scheduler. The parameters that it leaves out are a separate, frozen
    group."""
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in held]
    if rest:
        first = optimizer.param_groups[0]
        optimizer.add_param_group({"params": rest, "name": "frozen", "lr": first["lr"]})
    return optimizer


def holder(made: Iterable[nn.Module], groups: Sequence[Mapping[str, Any]], new: Callable[[], nn.Module]) -> nn.Module:
    """The module whose parameters are in `groups`: one of `made`, or a new one that gets them in order, because
    `verify` lets an optimizer update copies.

    Raises:
        UsageError: they are parameters of a different model.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in parameters}
    for module in made:
        if any(id(parameter) in ids for parameter in module.parameters()):
            return module
    module = new()
    named = list(module.named_parameters())
    if [one.shape for _, one in named] != [one.shape for one in parameters]:
        raise refused("the parameters belong to a different model", "Task.optimizer", "leave out optim.groups")
    for (name, _), parameter in zip(named, parameters, strict=True):
        parent, _, key = name.rpartition(".")
        module.get_submodule(parent)._parameters[key] = parameter  # it may be a tensor
    return module


def trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of the trainable parameters that an optimizer has."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name for name, one in module.named_parameters() if one.requires_grad and id(one) in held}


def names_of(value: Sequence[str], most: int = 3) -> str:
    """The first few names, for messages."""
    return ", ".join(value[:most]) + (f" and {len(value) - most} more" if len(value) > most else "")
