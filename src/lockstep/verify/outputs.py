"""What a loss makes of outputs that no model gave: the best constant one, and the best for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.build import seed_everything
from lockstep.data.loader import MicroBatches, map_tensors
from lockstep.distributed.strategy import split_output
from lockstep.distributed.world import join_world
from lockstep.engine.step import SAMPLES
from lockstep.errors import UsageError
from lockstep.tasks.task import Task
from lockstep.trainer import Trainer
from lockstep.verify.adjusted import Adjusted, Adjustment, readable, units_of

_AT_ONCE = 64


class Outputs(nn.Module):
    """Stands for a model: its outputs have the model's shapes, and are parameters themselves.

    Args:
        model: is run for the shapes.
        constant: the same output for every sample; else one of its own for each sample of the one batch that it is for.
    """

    def __init__(self, model: nn.Module, constant: bool) -> None:
        super().__init__()
        object.__setattr__(self, "inner", model)  # no submodule: its parameters are not to be fitted
        self.constant = constant
        self.outputs = nn.ParameterList()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.inner.parameters(recurse)  # type: ignore[no-any-return] # which a loss may ask for a dtype or a device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            made = self.inner(*args, **kwargs)
        place = -1

        def instead(tensor: Tensor) -> Tensor:
            nonlocal place
            if not tensor.is_floating_point() or not tensor.ndim:
                return tensor
            place += 1
            shape = tensor.shape[1:] if self.constant else tensor.shape
            if place == len(self.outputs):
                self.outputs.append(nn.Parameter(tensor.new_zeros(shape)))
            if self.outputs[place].shape != shape:
                raise UsageError("the shape of the model's output changes with its input")
            output: Tensor = self.outputs[place].expand(tensor.shape)
            return output

        return map_tensors(made, instead)


def fit(task: Task, outputs: Outputs, device: torch.device) -> tuple[float, float]:
    """Fit them to the task's training data by its own loss: classes' frequencies for a constant and cross-entropy, the mean for a squared
    error. Returns the loss of outputs that are all zero, and the one that is left.

    Raises:
        UsageError: the loss does not come from tensors that the model returns.
    """
    batches = _batches(task, device)
    units = units_of(task, batches)

    def objective() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for batch, _ in batches:
            losses, _ = split_output(task.loss(outputs, batch))
            for head, loss in (losses if isinstance(losses, Mapping) else {"loss": losses}).items():
                count = units.get(head, units.get(SAMPLES, 0.0))
                total = total + (task.coefficients.get(head, 1.0) * loss.cpu().double() / count if count else 0.0)
        return total

    value, parameters = objective(), list(outputs.outputs)
    if (
        not parameters
        or not value.requires_grad
        or not any(one is not None for one in torch.autograd.grad(value, parameters, allow_unused=True))
    ):
        raise UsageError("the loss does not come from tensors that the model returns")
    optimizer = torch.optim.LBFGS(parameters, max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective()
        torch.autograd.backward(value)
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return float(value.detach()), float(objective().detach())


def _batches(task: Task, device: torch.device) -> list[tuple[Any, int]]:
    """Training data in batches, each with its number of samples."""
    data = task.train_data()
    samples = readable(MicroBatches(data, task, 0, False, "skip"), range(len(data)), 0)  # type: ignore[arg-type]
    cuts = [samples[start : start + _AT_ONCE] for start in range(0, len(samples), _AT_ONCE)]
    return [(map_tensors(task.collate(cut), lambda tensor: tensor.to(device)), len(cut)) for cut in cuts]


def least_loss(config: Mapping[str, Any], adjustment: Adjustment) -> float:
    """The least loss that any outputs could have on a few training samples (label smoothing leaves some); 0 where it cannot be found."""
    trainer = Trainer(config, quiet=True)
    task = Adjusted(trainer.task(), adjustment)
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        try:
            first, least = fit(task, Outputs(task.model().to(world.device).eval(), constant=False), world.device)
        except Exception:
            return 0.0
    return max(0.0, least) if least < 0.99 * first else 0.0  # a loss that hears nothing of the output has no such bound
