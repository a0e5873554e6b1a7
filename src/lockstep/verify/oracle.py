"""What plain torch makes of a step: the gradient of one global batch on one process, without the engine's arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.build import PreparedRun
from lockstep.data.loader import map_tensors
from lockstep.data.order import StepPlan, derive_seed
from lockstep.distributed.sharded_tensor import gather_on_rank0
from lockstep.engine.step import SAMPLES
from lockstep.tasks.task import Task
from lockstep.verify.adjusted import units_of

_AT_ONCE = 64


@dataclass
class Update:
    """A gradient by plain torch beside the one that the optimizer got.

    difference: 2-norm of their difference, relative to the plain one's. worst: the parameter that differs most. condition: sum of the
    norms of the parts that were added, relative to the norm of their sum: how far rounding can be amplified by it.
    ratio: norm of the optimizer's, relative to the plain one's. epsilon: relative rounding of the loss's number format.
    """

    gradient: dict[str, Tensor] = field(default_factory=dict, repr=False)
    difference: float = math.nan
    ratio: float = math.nan
    worst: str = ""
    condition: float = 1.0
    epsilon: float = 0.0

    def compare(self, actual: Mapping[str, Tensor], clip_norm: float | None) -> Update:
        """With the optimizer's gradient, which was clipped to `clip_norm`. The gradients themselves are let go."""
        norm = _norm(self.gradient)
        factor = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm is not None else 1.0
        differences = {}
        for name in self.gradient.keys() | actual.keys():
            plain = self.gradient[name] * factor if name in self.gradient else torch.zeros(1)
            differences[name] = (
                float((actual[name].cpu().double() - plain.double()).norm()) if name in actual else float(plain.norm())
            )
        scale = norm * factor or 1.0
        worst = max(differences, key=lambda name: differences[name], default="")
        total = math.sqrt(sum(one * one for one in differences.values()))
        return Update({}, total / scale, _norm(actual) / scale, worst, self.condition, self.epsilon)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors.values()))


def plain_gradient(prepared: PreparedRun, task: Task) -> Update:
    """The gradient of (sum of losses) / (sum of weights) over the global batch of the step that is about to begin, on rank 0.

    From the plan's indices on: samples are read and prepared anew, and pass through a new model with the current weights.
    Memory: a second model and two gradients on rank 0. A collective: all ranks call it.
    """
    model = _twin(prepared, task)
    if model is None:
        return Update()
    batches = _global_batch(prepared, task)
    units = units_of(task, batches)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradient = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    norms = epsilon = 0.0
    for batch, _ in batches:
        losses = task.loss(model, batch)
        heads: dict[str, Tensor] = losses if isinstance(losses, dict) else {"loss": losses}
        epsilon = max(torch.finfo(loss.dtype).eps for loss in heads.values())
        objective: Any = 0.0
        for head, loss in heads.items():
            count = units.get(head, units.get(SAMPLES, 0.0))
            objective = objective + (task.coefficients().get(head, 1.0) * loss / count if count else 0.0 * loss)
        parts = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
        added = {name: part for name, part in zip(parameters, parts, strict=True) if part is not None}
        norms += _norm(added)
        for name, part in added.items():
            gradient[name] += part
    norm = _norm(gradient)
    return Update(
        {name: one.cpu() for name, one in gradient.items()}, condition=norms / norm if norm else 1.0, epsilon=epsilon
    )


def _twin(prepared: PreparedRun, task: Task) -> nn.Module | None:
    """A new model with the current weights, whole, on rank 0; None elsewhere."""
    model, world = prepared.built.model, prepared.state.world
    weights = {
        name: gather_on_rank0(tensor, world)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    if world.rank:
        return None
    twin = task.model().to(world.device)
    twin.load_state_dict(weights, strict=False)
    buffers, trains = (
        dict(model.named_buffers()),
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
    )
    with torch.no_grad():
        for name, buffer in twin.named_buffers():
            buffer.copy_(buffers[name])  # also those that no state holds
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(trains[name])
    return twin.train()


def _global_batch(prepared: PreparedRun, task: Task) -> list[tuple[Any, int]]:
    """The next step's samples, in batches, each with its size."""
    plan = prepared.plan
    whole = StepPlan(plan.length, plan.global_batch, plan.global_batch, 1, plan.seed, plan.drop_last)
    indices, epoch = whole.indices(prepared.state.step)
    data: Any = task.train_data()
    samples = []
    for index in map(int, indices):
        seed = derive_seed(plan.seed, epoch, index)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            samples.append(task.prepare(data[index], epoch, True))
        except Exception:
            if not prepared.state.must_agree_on_weights:  # samples may not be skipped
                raise
    cuts = [samples[start : start + _AT_ONCE] for start in range(0, len(samples), _AT_ONCE)]
    return [
        (map_tensors(task.collate(cut), lambda tensor: tensor.to(prepared.state.world.device)), len(cut))
        for cut in cuts
    ]
