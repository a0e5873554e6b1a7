"""A second copy of the parameters that plain `torch.optim` moves, given the gradients of the run: what the update must come to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lockstep.build import PreparedRun
from lockstep.engine.schedule import scaled_lr


class Shadow:
    """Follows a training on one process, update by update.

    Args:
        config: of the run, as `RunConfig` writes it; read here once more, without the engine.

    differences: by what was compared (weights, averages), the 2-norm of the largest difference so far. trainable: complaints about
    parameters that train though they should be frozen, or the other way round.
    """

    def __init__(self, prepared: PreparedRun, config: Mapping[str, Any]) -> None:
        self.prepared, self.config = prepared, config
        self.model = prepared.built.model
        self.twins = {
            name: parameter.detach().clone().requires_grad_() for name, parameter in self.model.named_parameters()
        }
        self.optimizer = self._optimizer()
        decay = config["train"]["ema_decay"]
        self.averages = {name: twin.detach().clone() for name, twin in self.twins.items()} if decay else {}
        self.decay = decay or 0.0
        self.updates = 0
        self.differences = {"weights": 0.0, **({"averages": 0.0} if decay else {})}
        self.since, self.trainable = self._since(), list[str]()

    def _optimizer(self) -> torch.optim.Optimizer:
        optim = self.config["optim"]
        groups: dict[tuple[float, float | None], list[Tensor]] = {}
        scale = scaled_lr(
            1.0,
            optim["lr_scaling"],
            global_batch=int(self.config["batch"]["global"]),
            reference_batch=optim["reference_batch"],
        )
        for name, twin in self.twins.items():
            own: Mapping[str, Any] = next(
                (g for g in optim["groups"] if any(fnmatchcase(name, one) for one in g["match"])), {}
            )
            decay = own.get("weight_decay") if own.get("weight_decay") is not None else optim["weight_decay"]
            key = ((own.get("lr") or optim["lr"]) * scale, decay)
            groups.setdefault(key, []).append(twin)
        built = [
            {"params": twins, "lr": lr} | ({} if decay is None else {"weight_decay": decay})
            for (lr, decay), twins in groups.items()
        ]
        self.rates = [rate for rate, _ in groups]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, optim["name"])(built, **optim["args"])
        return optimizer

    def before_update(self, step: int) -> None:
        """The run's optimizer is about to step: do the same here."""
        for name, parameter in self.model.named_parameters():
            since = self.since.get(name)
            if since is not None and parameter.requires_grad != (step >= since):
                self.trainable.append(
                    f"{name} {'trains' if parameter.requires_grad else 'is frozen'} in step {step + 1}, against train.unfreeze"
                )
            self.twins[name].grad = None if parameter.grad is None else parameter.grad.detach().clone()
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.prepared.state.schedule(self.updates)
        self.optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for name, average in self.averages.items():
                average.mul_(self.decay).add_(self.twins[name], alpha=1 - self.decay)

    def after_step(self) -> None:
        """Compare with what the run's optimizer did."""
        pairs: dict[str, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = {
            "weights": (self.twins, dict(self.model.named_parameters()))
        }
        if self.prepared.state.averages is not None and self.averages:
            pairs["averages"] = (self.averages, self.prepared.state.averages.tensors)
        for kind, (mine, theirs) in pairs.items():
            apart = max(
                (
                    float((mine[name].detach().double() - theirs[name].detach().double()).norm())
                    for name in theirs
                    if name in mine
                ),
                default=0.0,
            )
            self.differences[kind] = max(self.differences[kind], apart) if math.isfinite(apart) else math.inf

    def _since(self) -> dict[str, int]:
        """From which step on (counted from 0) each parameter trains that the config freezes at first."""
        found: dict[str, int] = {}
        for stage in self.config["train"]["unfreeze"]:
            start = stage["step"] or math.ceil(stage["epoch"] * self.prepared.plan.steps_per_epoch)
            for name in self.twins:
                if any(fnmatchcase(name, pattern) for pattern in stage["match"]):
                    found[name] = min(start, found.get(name, start))
        return found
