"""A second copy of the parameters that plain `torch.optim` updates with the gradients of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lockstep.build import PreparedRun
from lockstep.engine.schedule import scaled_lr


class ReferenceOptimizer:
    """Repeats each update of a training on one process with an optimizer of its own, and compares the results.

    Args:
        prepared: the training.
        config: of the training, as `RunConfig` writes it. It is interpreted here a second time, without the engine.
    """

    def __init__(self, prepared: PreparedRun, config: Mapping[str, Any]) -> None:
        self.prepared, self.config = prepared, config
        self.model = prepared.built.model
        self.copies = {
            name: parameter.detach().clone().requires_grad_() for name, parameter in self.model.named_parameters()
        }
        self.optimizer = self._make_optimizer()
        decay = config["train"]["ema_decay"]
        self.averages = {name: copy.detach().clone() for name, copy in self.copies.items()} if decay else {}
        self.decay = decay or 0.0
        self.updates = 0
        self.differences = {"weights": 0.0, **({"averages": 0.0} if decay else {})}
        """Of weights and averages: the largest difference so far, as the 2-norm of the tensor that differs most."""
        self.wrongly_trainable: list[str] = []
        """Complaints about parameters that train and should be frozen, or are frozen and should train."""
        self._first_steps = self._first_trained_steps()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optim = self.config["optim"]
        groups: dict[tuple[float, float | None], list[Tensor]] = {}
        scale = scaled_lr(
            1.0,
            optim["lr_scaling"],
            global_batch=int(self.config["batch"]["global"]),
            reference_batch=optim["reference_batch"],
        )
        for name, copy in self.copies.items():
            matching = [group for group in optim["groups"] if any(fnmatchcase(name, glob) for glob in group["match"])]
            group: Mapping[str, Any] = matching[0] if matching else {}
            decay = group.get("weight_decay") if group.get("weight_decay") is not None else optim["weight_decay"]
            groups.setdefault(((group.get("lr") or optim["lr"]) * scale, decay), []).append(copy)
        self.learning_rates = [rate for rate, _ in groups]
        param_groups = [
            {"params": copies, "lr": rate} | ({} if decay is None else {"weight_decay": decay})
            for (rate, decay), copies in groups.items()
        ]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, optim["name"])(param_groups, **optim["args"])
        return optimizer

    def before_update(self, step: int) -> None:
        """Make the update that the training's optimizer is about to make in `step` (counted from 0)."""
        for name, parameter in self.model.named_parameters():
            first = self._first_steps.get(name)
            if first is not None and parameter.requires_grad != (step >= first):
                state = "trains" if parameter.requires_grad else "is frozen"
                self.wrongly_trainable.append(f"{name} {state} in step {step + 1}, against train.unfreeze")
            self.copies[name].grad = None if parameter.grad is None else parameter.grad.detach().clone()
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * self.prepared.state.schedule(self.updates)
        self.optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for name, average in self.averages.items():
                average.mul_(self.decay).add_(self.copies[name], alpha=1 - self.decay)

    def after_step(self) -> None:
        """Compare with the weights and averages of the training."""
        self._compare("weights", self.copies, dict(self.model.named_parameters()))
        if self.prepared.state.averages is not None and self.averages:
            self._compare("averages", self.averages, self.prepared.state.averages.tensors)

    def _compare(self, kind: str, own: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        names = [name for name in trained if name in own]
        differences = [own[name].detach().double() - trained[name].detach().double() for name in names]
        largest = max((float(difference.norm()) for difference in differences), default=0.0)
        self.differences[kind] = max(self.differences[kind], largest) if math.isfinite(largest) else math.inf

    def _first_trained_steps(self) -> dict[str, int]:
        """For each parameter that the config freezes at first: the step (counted from 0) from which it trains."""
        steps: dict[str, int] = {}
        for stage in self.config["train"]["unfreeze"]:
            start = stage["step"] or math.ceil(stage["epoch"] * self.prepared.plan.steps_per_epoch)
            for name in self.copies:
                if any(fnmatchcase(name, pattern) for pattern in stage["match"]):
                    steps[name] = min(start, steps.get(name, start))
        return steps
