"""Outputs that are fitted to a loss without a model: the best constant output, and the best output for each sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep.core.parallel.world import join_world
from lockstep.core.run_model import seed_everything
from lockstep.core.task import Task
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify import generators
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.reference.evaluation import trained_model

_BATCH_SIZE = 64
_MOST_NUMBERS = 8_000_000  # L-BFGS keeps up to 120 copies of them
_ROUNDING = 1e-4
_UNSEEN = 1e-3  # shared by all classes: a class that is never the target also has a probability


class FreeOutputs(nn.Module):
    """Replaces a model. Its outputs have the shapes of the model's outputs, and are parameters themselves.

    Args:
        model: runs once to find the shapes.
        constant: the same output for every sample, and for every place of a map or token of a text; otherwise one
            output per sample, for a single batch.
    """

    def __init__(self, model: nn.Module, constant: bool) -> None:
        super().__init__()
        object.__setattr__(self, "inner", model)  # not a submodule: its parameters are not fitted
        self.constant = constant
        self.outputs = nn.ParameterList()
        self._learns: list[bool] = []  # by output of the first call
        self._known: dict[tuple[Any, ...], Any] = {}  # outputs of the model, by the shapes of its inputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the model, which a loss may query for a dtype or a device."""
        return self.inner.parameters(recurse)  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache"):  # the model generates a text token by token, which is not part of the loss
            return self.inner(*args, **kwargs)
        model_outputs = self._outputs_of_model(args, kwargs)
        tokens = {tensor.shape for tensor in data.tensors((args, kwargs)) if not tensor.is_floating_point()}
        place = call = -1

        def replace(tensor: Tensor) -> Tensor:
            nonlocal place, call
            call += _is_replaced(tensor)
            if not _is_replaced(tensor) or not (self._are_all_free or self._learns[call % len(self._learns)]):
                return tensor
            place += 1
            shape = _constant_shape(tensor, tensor.shape[:-1] in tokens) if self.constant else tensor.shape
            if place == len(self.outputs):
                self.outputs.append(nn.Parameter(tensor.new_zeros(shape)))
            if self.outputs[place].shape != shape:
                raise UsageError("the shape of the model's output changes with its input")
            output: Tensor = self.outputs[place].expand(tensor.shape)
            return output.contiguous()  # a loss may view it

        return data.mapped(model_outputs, replace)

    @property
    def _are_all_free(self) -> bool:
        """True if no output is a target, such as that of a frozen teacher, which no parameter reaches."""
        return all(self._learns) or not any(self._learns)

    def _outputs_of_model(self, args: Any, kwargs: Any) -> Any:
        """The outputs of the model. It runs once for inputs of the same shapes, if all its outputs are replaced."""
        shapes = tuple(tensor.shape for tensor in data.tensors((args, kwargs)))
        if shapes in self._known:
            return self._known[shapes]
        with torch.enable_grad():
            outputs = self.inner(*args, **kwargs)
        if not self._learns:
            self._learns = [tensor.requires_grad for tensor in data.tensors(outputs) if _is_replaced(tensor)]
        outputs = data.mapped(outputs, torch.Tensor.detach)
        if shapes and all(map(_is_replaced, data.tensors(outputs))) and self._are_all_free:
            self._known[shapes] = outputs
        return outputs


def _is_replaced(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 0


def _constant_shape(tensor: Tensor, by_token: bool) -> tuple[int, ...]:
    """The shape of an output that is the same for every sample.

    Outputs by token (samples, tokens, classes) have a number for each class.
    Maps (samples, channels, height, width) have a number for each channel: images may differ in size, and a number for
    each position would learn where things usually are.
    """
    if by_token and tensor.ndim == 3:
        return (1, tensor.shape[2])
    if tensor.ndim < 4:
        return tuple(tensor.shape[1:])
    return (tensor.shape[1], *(1 for _ in tensor.shape[2:]))


def _mean_loss(task: Task, model: nn.Module, batches: Any, units: Mapping[str, float], draw: int) -> Tensor:
    """The total loss per unit, with the random numbers of the draw `draw`."""
    generators.disturb(draw)
    total = torch.zeros((), dtype=torch.float64)
    for batch, _ in batches:
        for head, loss in data.losses(task, model, batch).items():
            count = data.units_of(units, head)
            total = total + (task.coefficients.get(head, 1.0) * loss.cpu().double() / count if count else 0.0)
    return total


def fit_outputs(
    task: Task, outputs: FreeOutputs, device: torch.device, draws: Sequence[int] = (0,)
) -> tuple[float, float]:
    """Fit the outputs to the task's training data with the task's loss.

    The best constant output is the frequency of each class for cross-entropy, and the mean for a squared error.

    Args:
        draws: of the random numbers of the loss. The mean over them is fitted.

    Returns:
        The loss of outputs that are all zero, and the loss of the fitted outputs.

    Raises:
        UsageError: the loss does not come from tensors that the model returns, or they are too large.
    """
    batches = _batches(task, device)
    units = data.count_units(task, batches)

    def objective() -> Tensor:
        losses = [_mean_loss(task, outputs, batches, units, draw) for draw in draws]
        return torch.stack(losses).mean()

    first, parameters = objective(), list(outputs.outputs)
    if sum(parameter.numel() for parameter in parameters) > _MOST_NUMBERS:
        raise UsageError(f"the model's outputs have more than {_MOST_NUMBERS:,} numbers")
    reached = bool(parameters) and first.requires_grad
    gradients = torch.autograd.grad(first, parameters, allow_unused=True) if reached else ()
    if all(gradient is None for gradient in gradients):
        raise UsageError("the loss does not come from tensors that the model returns")
    started = [_begin_at_frequencies(*pair) for pair in zip(parameters, gradients, strict=True)]
    least = 1e-3 if all(started) else 1e-7
    optimizer = torch.optim.LBFGS(parameters, max_iter=60, tolerance_grad=least, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective()
        torch.autograd.backward(value)
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return float(first.detach()), float(objective().detach())


def _begin_at_frequencies(output: nn.Parameter, gradient: Tensor | None) -> bool:
    """Set an output by token to the logarithms of the frequencies of its classes, which are optimal for cross-entropy.

    Vocabularies are large, and L-BFGS takes long from zero. At zero, the gradient of a cross-entropy by class is
    1 / classes minus the frequency of the class.

    Returns:
        whether the gradient can be that of a cross-entropy, and the output was set.
    """
    if gradient is None or output.ndim != 2 or len(output) != 1:
        return False
    frequencies = 1 / output.numel() - gradient
    if float(frequencies.min()) < -_ROUNDING or float(gradient.sum().abs()) > _ROUNDING:
        return False
    with torch.no_grad():
        output.copy_((frequencies.clamp(min=0) + _UNSEEN / output.numel()).log())
    return True


def _batches(task: Task, device: torch.device) -> list[tuple[Any, int]]:
    """The training data in batches, each with its number of samples."""
    samples_of: Any = task.train_data()
    samples = data.read(task, samples_of, range(len(samples_of)), epoch=0, training=False, seed=0, skip=True)
    parts = [samples[start : start + _BATCH_SIZE] for start in range(0, len(samples), _BATCH_SIZE)]
    return [(data.to_device(task.collate(part), device), len(part)) for part in parts]


def least_loss(config: Mapping[str, Any], changes: TaskChanges) -> float:
    """The least loss that any outputs could have on a few training samples; 0 if it cannot be found.

    Label smoothing, for example, leaves a loss above zero.
    """
    trainer = Trainer(config, quiet=True)
    task = ComparableTask(task_of(trainer), changes)
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        try:
            outputs = FreeOutputs(task.model().to(world.device).eval(), constant=False)
            first, least = fit_outputs(task, outputs, world.device)
        except Exception:
            return 0.0
    return max(0.0, least) if least < 0.99 * first else 0.0  # a loss that ignores the outputs has no least value


def losses_by_draw(config: Mapping[str, Any], folder: str, changes: TaskChanges, draws: int) -> dict[str, list[float]]:
    """The losses of a few training samples with the same random draws for each model.

    Returns:
        those of the model that was `trained` in `folder`, and of the best `constant` output, if one can be fitted.
    """
    trainer = Trainer(config, quiet=True)
    task = ComparableTask(task_of(trainer), changes)
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        outputs = FreeOutputs(task.model().to(world.device).train(), constant=True)
        models = {"trained": trained_model(task, folder, config, world.device).train()}
        with contextlib.suppress(Exception):
            fit_outputs(task, outputs, world.device, range(draws))
            models["constant"] = outputs
        batches = _batches(task, world.device)
        units, fresh = data.count_units(task, batches), range(draws, 2 * draws)
        with torch.no_grad():
            return {
                name: [float(_mean_loss(task, model, batches, units, draw)) for draw in fresh]
                for name, model in models.items()
            }
