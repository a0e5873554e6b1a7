"""A second copy of the parameters that plain `torch.optim` updates with the gradients of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep_lab.verify.reference import schedule
from lockstep_lab.verify.reference.data import numbers

_DEFAULT_RATE = 1e-3  # from docs/config.md


class ReferenceOptimizer:
    """Repeats each update of a training on one process with its own optimizer, and compares the results.

    Args:
        model: the model that trains.
        config: of the training, as `RunConfig` writes it, with a number as its global batch and as its steps.
        steps_per_epoch: steps of an epoch.
        blocks: names of the model's repeated blocks, for `optim.layer_decay`.
        state: the optimizer's initial state, by parameter.
        find: returns the class of a name. None: names are classes of `torch.optim`.
        make: `Task.optimizer`.
        factor: the user's schedule, which replaces the config's.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        *,
        steps_per_epoch: int,
        blocks: Sequence[str] = (),
        state: Mapping[Tensor, Mapping[str, Any]] | None = None,
        find: Callable[[str], type[torch.optim.Optimizer]] | None = None,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer | None] | None = None,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        self.model, self.config, self.steps_per_epoch = model, config, steps_per_epoch
        self.copies = {
            name: parameter.detach().clone().requires_grad_(parameter.is_floating_point() or parameter.is_complex())
            for name, parameter in self.model.named_parameters()
        }
        self._names: dict[str, list[str]] = {}  # all names of a tied parameter, by its first
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(first.setdefault(id(parameter), name), []).append(name)
        self._find = find or partial(getattr, torch.optim)
        self._factor = factor
        self.optimizers = self._make_optimizers(blocks, make)
        for name, parameter in self.model.named_parameters():
            slots = (state or {}).get(parameter, {})
            if slots:
                self._holder(self.copies[name]).state[self.copies[name]] = {
                    slot: value.detach().clone() if isinstance(value, Tensor) else value
                    for slot, value in slots.items()
                }
        decay = config["train"]["ema_decay"]
        held = self.model.state_dict() if decay else {}  # it may leave out what is frozen
        self.averages = {name: copy.detach().clone() for name, copy in self.copies.items() if name in held}
        self.decay = decay or 0.0
        self.learning_rates = [group["lr"] for group in self._groups()]
        self.updates = 0
        self._has_updated = False  # since the last step
        self.differences = {"weights": 0.0, **({"averages": 0.0} if decay else {})}
        """Of weights and averages: the largest difference so far, as the 2-norm of the tensor that differs most."""
        self.wrongly_trainable: list[str] = []
        """Complaints about parameters that train and should be frozen, or are frozen and should train."""
        self._first_steps = self._first_trained_steps(blocks)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _holder(self, copy: Tensor) -> torch.optim.Optimizer:
        """The optimizer of this copy."""
        holds = (
            one for one in self.optimizers if any(own is copy for group in one.param_groups for own in group["params"])
        )
        return next(holds)

    def _make_optimizers(
        self, blocks: Sequence[str], make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer | None] | None
    ) -> list[torch.optim.Optimizer]:
        optim = self.config["optim"]
        scale = schedule.scaled_lr(optim, int(self.config["batch"]["global"]))
        levels = _levels(list(self.copies), blocks) if optim["layer_decay"] is not None else {}
        groups: dict[str, list[dict[str, Any]]] = {}  # by the name of a group with its own optimizer
        for name, copy in self.copies.items():
            own: Mapping[str, Any] = next(
                (group for group in optim["groups"] if _takes(group, self._names[name], copy)), {}
            )
            rate = own.get("lr")
            if not rate:
                below_top = max(levels.values()) - levels[name] if levels else 0
                rate = optim["lr"] * (optim["layer_decay"] or 1.0) ** below_top
            decay = own.get("weight_decay")
            decay = optim["weight_decay"] if decay is None else decay
            options = {} if decay is None else {"weight_decay": decay}
            by_itself = own["name"] if own.get("optimizer") else ""
            made = {"params": [copy], "lr": rate * scale, "name": own.get("name", "default"), **options}
            groups.setdefault(by_itself, []).append(made)
        all_groups = [dict(group) for some in groups.values() for group in some]
        own_rates = {group["name"] for group in optim["groups"] if group["lr"]}
        if optim["lr"] == _DEFAULT_RATE and optim["layer_decay"] is None:  # then the task chooses
            for group in all_groups:
                if group["name"] not in own_rates:
                    del group["lr"]
        given = {id(group["params"][0]) for group in all_groups if "lr" in group}
        theirs = make(all_groups) if make else None
        if theirs is not None:
            for group in theirs.param_groups:
                group["lr"] *= 1.0 if id(group["params"][0]) in given else scale
            return [theirs]
        settings = {"": (optim["name"], optim["args"])}
        settings |= {group["name"]: (group["optimizer"], group["args"]) for group in optim["groups"]}
        return [self._find(settings[key][0])(some, **settings[key][1]) for key, some in groups.items()]

    def before_update(self, step: int, *, is_first: bool = True, moved: Sequence[str] = ()) -> None:
        """Make the update that the training's optimizer is about to make in `step` (counted from 0).

        Args:
            is_first: whether it is the first update of this step. Each alternating optimizer makes one.
            moved: names of parameters that forward passes change: the update starts from their values.
        """
        self.updates += is_first
        self._follow(moved)
        for name, parameter in self.model.named_parameters():
            first = self._first_steps.get(name)
            if first is not None and parameter.requires_grad != (step >= first):
                state = "trains" if parameter.requires_grad else "is frozen"
                self.wrongly_trainable.append(f"{name} {state} in step {step + 1}, against train.unfreeze")
            self.copies[name].grad = None if parameter.grad is None else parameter.grad.detach().clone()
        factor = schedule.factor(
            self.config["schedule"],
            self.updates - 1,
            total=self.config["train"]["steps"],
            steps_per_epoch=self.steps_per_epoch,
            own=self._factor,
        )
        for group, rate in zip(self._groups(), self.learning_rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.step()
        self._has_updated = True

    def _follow(self, moved: Sequence[str]) -> None:
        """Copy what forward passes have written: into frozen parameters, such as those of a momentum encoder, and into
        those of these names. What an update changes in them is still compared."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in moved or not parameter.requires_grad:
                    self.copies[name].copy_(parameter)

    def after_step(self, averages: Mapping[str, Tensor] | None, moved: Sequence[str] = ()) -> None:
        """Compare with the weights of the training, and with its averages, if it keeps any."""
        if self._has_updated:
            self._has_updated = False
            self._average()
        else:
            self._follow(moved)  # the update was skipped
        self._compare("weights", self.copies, dict(self.model.named_parameters()))
        if self.averages:
            self._compare("averages", self.averages, averages or {})

    def _average(self) -> None:
        share = max(1 - self.decay, 9 / (10 + self.updates))  # of the new weights in the averages: docs/checkpoints.md
        with torch.no_grad():
            trained = dict(self.model.named_parameters())
            for name, average in self.averages.items():
                if trained[name].requires_grad and (average.is_floating_point() or average.is_complex()):
                    average.mul_(1 - share).add_(self.copies[name], alpha=share)
                else:
                    average.copy_(self.copies[name])

    def _compare(self, kind: str, own: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        if own.keys() != trained.keys():
            self.differences[kind] = math.inf
            return
        differences = [numbers(own[name]) - numbers(trained[name]) for name in own]
        largest = max((float(difference.norm()) for difference in differences), default=0.0)
        self.differences[kind] = max(self.differences[kind], largest) if math.isfinite(largest) else math.inf

    def _first_trained_steps(self, blocks: Sequence[str]) -> dict[str, int]:
        """For each parameter that the config freezes at first: the step (counted from 0) from which it trains."""
        steps: dict[str, int] = {}
        for stage in self.config["train"]["unfreeze"]:
            start = stage["step"] or math.ceil(Fraction(str(stage["epoch"] or 0)) * self.steps_per_epoch)
            named = _named_by_words(stage["match"], list(self.copies), blocks)
            for name, names in self._names.items():
                if name in named or _matches(names, stage["match"]):
                    steps[name] = min(start, steps.get(name, start))
        return steps


def _takes(group: Mapping[str, Any], names: Sequence[str], copy: Tensor) -> bool:
    return group["ndim"] in (None, copy.ndim) and _matches(names, group["match"])


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _named_by_words(words: Sequence[str], names: Sequence[str], blocks: Sequence[str]) -> set[str]:
    """The parameters that `all`, `head` and `last N` of `train.unfreeze` name."""
    found = set(names) if "all" in words else set()
    level = _levels(names, blocks)
    for word in words:
        if word == "head" or word.startswith("last "):
            block = len(blocks) if word == "head" else len(blocks) + 1 - int(word[5:])
            end = names[[level[name] for name in names].index(block) :]
            found |= {name for name in end if word != "head" or name.split(".")[0] != blocks[-1].split(".")[0]}
    return found


def _levels(names: Sequence[str], blocks: Sequence[str]) -> dict[str, int]:
    """The level of each parameter: 0 before the first block, the number of its block from 1, one more after them."""
    of_block = {name: place for name in names for place, block in enumerate(blocks, 1) if name.startswith(f"{block}.")}
    first = min((place for place, name in enumerate(names) if name in of_block), default=len(names))
    return {name: of_block.get(name, 0 if place < first else len(blocks) + 1) for place, name in enumerate(names)}
