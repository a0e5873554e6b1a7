"""The gradient of one global batch by plain torch on one process, without the arithmetic of the engine."""

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
from lockstep.distributed.strategy import split_output
from lockstep.engine.step import SAMPLES
from lockstep.tasks.task import Task
from lockstep.verify.comparable_task import count_units

_BATCH_SIZE = 64


@dataclass
class GradientComparison:
    """The gradient by plain torch, compared with the gradient that the optimizer got."""

    gradient: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """By plain torch, by parameter; empty after the comparison."""
    difference: float = math.nan
    """2-norm of the difference between the two gradients, relative to the norm of plain torch's."""
    ratio: float = math.nan
    """Norm of the optimizer's gradient, relative to the norm of plain torch's."""
    worst: str = ""
    """The parameter whose gradients differ most."""
    condition: float = 1.0
    """Sum of the norms of the added parts, relative to the norm of their sum: how much rounding is amplified."""
    epsilon: float = 0.0
    """Relative rounding of the number format of the loss."""

    def compare(self, actual: Mapping[str, Tensor], clip_norm: float | None) -> GradientComparison:
        """Compare with the gradient `actual` that the optimizer got, clipped to `clip_norm`."""
        norm = _norm(self.gradient)
        factor = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm is not None else 1.0
        differences = {}
        for name in self.gradient.keys() | actual.keys():
            plain = self.gradient[name] * factor if name in self.gradient else torch.zeros(1)
            difference = actual[name].cpu().double() - plain.double() if name in actual else plain
            differences[name] = float(difference.norm())
        scale = norm * factor or 1.0
        return GradientComparison(
            difference=math.sqrt(sum(difference * difference for difference in differences.values())) / scale,
            ratio=_norm(actual) / scale,
            worst=max(differences, key=lambda name: differences[name], default=""),
            condition=self.condition,
            epsilon=self.epsilon,
        )


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def reference_gradient(prepared: PreparedRun, task: Task) -> GradientComparison:
    """The gradient of (sum of losses) / (sum of weights) over the global batch of the step that is about to begin.

    The samples of the plan's indices are read and prepared anew, and pass through a new model with the current weights.
    Rank 0 needs memory for a second model and two gradients. Other ranks return an empty comparison. All ranks must
    call this function.
    """
    model = _copy_of_model(prepared, task)
    if model is None:
        return GradientComparison()
    batches = _global_batch(prepared, task)
    units = count_units(task, batches)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradient = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    sum_of_norms = epsilon = 0.0
    for batch, _ in batches:
        losses, _ = split_output(task.loss(model, batch))
        heads: dict[str, Tensor] = losses if isinstance(losses, dict) else {"loss": losses}
        epsilon = max(torch.finfo(loss.dtype).eps for loss in heads.values())
        objective: Any = 0.0
        for head, loss in heads.items():
            count = units.get(head, units.get(SAMPLES, 0.0))
            objective = objective + (task.coefficients.get(head, 1.0) * loss / count if count else 0.0 * loss)
        grads = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
        part = {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}
        sum_of_norms += _norm(part)
        for name, grad in part.items():
            gradient[name] += grad
    norm = _norm(gradient)
    on_cpu = {name: grad.cpu() for name, grad in gradient.items()}
    return GradientComparison(on_cpu, condition=sum_of_norms / norm if norm else 1.0, epsilon=epsilon)


def _copy_of_model(prepared: PreparedRun, task: Task) -> nn.Module | None:
    """A new model with the current weights, unsharded, on rank 0; None on other ranks."""
    model, world = prepared.built.model, prepared.state.world
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = {name: gather_on_rank0(tensor, world) for name, tensor in tensors.items()}
    if world.rank:
        return None
    copy = task.model().to(world.device)
    copy.load_state_dict(weights, strict=False)
    buffers = dict(model.named_buffers())
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, buffer in copy.named_buffers():
            buffer.copy_(buffers[name])  # also buffers that no state dict holds
    for name, parameter in copy.named_parameters():
        parameter.requires_grad_(trainable[name])
    return copy.train()


def _global_batch(prepared: PreparedRun, task: Task) -> list[tuple[Any, int]]:
    """The samples of the next step in batches, each with its number of samples."""
    plan = prepared.plan
    one_rank = StepPlan(plan.length, plan.global_batch, plan.global_batch, 1, plan.seed, plan.drop_last)
    indices, epoch = one_rank.indices(prepared.state.step)
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
            if not prepared.state.must_agree_on_weights:  # True where the config skips samples that cannot be read
                raise
    device = prepared.state.world.device
    parts = [samples[start : start + _BATCH_SIZE] for start in range(0, len(samples), _BATCH_SIZE)]
    return [(map_tensors(task.collate(part), lambda tensor: tensor.to(device)), len(part)) for part in parts]
