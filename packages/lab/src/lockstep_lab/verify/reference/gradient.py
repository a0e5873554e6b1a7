"""The gradient of one global batch by plain torch on one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.task import Task, needs_global_batch
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.reference.order import positions_of_step
from lockstep_lab.verify.reference.sampling import draws_of

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
    noise: float = 0.0
    """2-norm of the difference from plain torch's gradient of the samples in reversed order, at weights that are each
    moved by one rounding; relative. It measures how this model amplifies rounding."""

    def compare(self, actual: Mapping[str, Tensor], clip_norm: float | None) -> GradientComparison:
        """Compare with the gradient `actual` that the optimizer got, clipped to `clip_norm`."""
        norm = _norm(self.gradient)
        factor = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm is not None else 1.0
        differences = {}
        for name in self.gradient.keys() | actual.keys():
            plain = self.gradient[name] * factor if name in self.gradient else torch.zeros(1)
            difference = data.numbers(plain) - (data.numbers(actual[name].cpu()) if name in actual else 0.0)
            differences[name] = float(difference.norm())
        scale = norm * factor or 1.0
        return GradientComparison(
            difference=math.sqrt(sum(difference * difference for difference in differences.values())) / scale,
            ratio=_norm(actual) / scale,
            worst=max(differences, key=lambda name: differences[name], default=""),
            condition=self.condition,
            epsilon=self.epsilon,
            noise=self.noise,
        )


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(data.numbers(tensor).square().sum()) for tensor in tensors.values()))


def reference_gradient(
    task: Task, model: nn.Module, config: Mapping[str, Any], step: int, device: torch.device
) -> GradientComparison:
    """The gradient of (sum of losses) / (sum of units) over the global batch of a step.

    The samples of the step are read and prepared again, in order. It needs memory for three gradients.

    Args:
        model: in training mode, with the weights of the step, which are moved by one rounding.
        config: of the training, as `RunConfig` writes it, with a number as its global batch.
        step: counted from 0.
        device: of the model.
    """
    samples_of: Any = task.train_data()
    draws = draws_of(samples_of, config)
    positions, epoch = positions_of_step(
        step,
        length=draws.length,
        global_batch=int(config["batch"]["global"]),
        seed=config["seed"],
        drop_last=config["data"]["drop_last"],
        group_by_length=config["data"]["group_by_length"],
        lengths=getattr(samples_of, "lengths", None),
        index=draws.index_at,
    )
    indices = [draws.index_at(place, epoch) for place in positions]
    words = positions if draws.may_repeat else indices
    skip, seed = config["data"]["on_error"] != "raise", config["seed"]
    samples = data.read(task, samples_of, indices, epoch=epoch, training=True, seed=seed, skip=skip, words=words)
    size = len(samples) if needs_global_batch(task) else _BATCH_SIZE
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    comparison = _gradient(task, model, parts, device)
    _move_by_one_rounding(model)
    again = _gradient(task, model, [part[::-1] for part in parts], device)
    change = {name: grad - again.gradient[name] for name, grad in comparison.gradient.items()}
    comparison.noise = _norm(change) / (_norm(comparison.gradient) or 1.0)
    return comparison


def _gradient(task: Task, model: nn.Module, parts: list[list[Any]], device: torch.device) -> GradientComparison:
    """The gradient over samples, with each part as one batch."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for player in task.players[:1]:
        tied = list(model.named_parameters(remove_duplicate=False))
        parameters = {n: one for n, one in parameters.items() if player.owns([key for key, p in tied if p is one])}
    by_head: dict[str, tuple[float, dict[str, Tensor], float]] = {}  # units, gradient, sum of the norms of its parts
    epsilon = 0.0
    for part in parts:
        batch = task.collate(part)
        losses = data.losses(task, model, data.to_device(batch, device))
        for player in task.players[:1]:  # the others update after it, in the same step
            losses = {player.name: losses[player.name]}
        counted = data.count_units(task, [(batch, len(part))])
        for place, (head, loss) in enumerate(losses.items()):
            epsilon = max(epsilon, torch.finfo(loss.dtype).eps)
            gradient = _gradient_of(loss, parameters, keep=place + 1 < len(losses))
            count, total, norms = by_head.get(head, (0.0, {}, 0.0))
            total = {name: total[name] + grad if name in total else grad for name, grad in gradient.items()}
            by_head[head] = (count + data.units_of(counted, head), total, norms + _norm(gradient))
    whole = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    sum_of_norms = 0.0
    for head, (count, total, norms) in by_head.items():
        if count:
            factor = task.coefficients.get(head, 1.0) / count
            sum_of_norms += abs(factor) * norms
            for name, grad in total.items():
                whole[name] += factor * grad
    norm = _norm(whole)
    on_cpu = {name: grad.cpu() for name, grad in whole.items()}
    return GradientComparison(on_cpu, condition=max(1.0, sum_of_norms / norm) if norm else 1.0, epsilon=epsilon)


def _move_by_one_rounding(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)


def _gradient_of(loss: Tensor, parameters: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The gradient of a sum of losses, by parameter.

    Args:
        keep: whether other losses come from the same forward pass.
    """
    if not loss.requires_grad:
        return {}
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=keep)
    return {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}
