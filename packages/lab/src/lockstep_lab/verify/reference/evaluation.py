"""Evaluation and prediction by a plain loop over the samples, in their order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.task import Metrics, Task, needs_global_batch, update_from_pair
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.reference.checkpoint import load_trained_weights, newest


def evaluate_model(
    task: Task, model: nn.Module, config: Mapping[str, Any], device: torch.device, *, micro_batch: int = 64
) -> dict[str, float]:
    """Loss and metrics over the evaluation data on one process: every sample once, in order.

    Args:
        config: of the training, as `RunConfig` writes it.
        device: of the model.

    Returns:
        `loss`, `loss/<head>` if there are several heads, an entry for each metric, `samples` and `bad` (unreadable
        samples, which are left out).
    """
    samples_of: Any = task.eval_data()
    length, bad = len(samples_of), 0
    metrics, update = _metrics(task)
    sums: dict[str, float] = {}
    units: dict[str, float] = {}
    model.eval()
    with torch.no_grad(), autocast(config, device):
        for start in range(0, length, micro_batch):
            indices = range(start, min(start + micro_batch, length))
            samples = _read(task, samples_of, indices, config)
            bad += len(indices) - len(samples)
            if not samples:
                continue
            batch = task.collate(samples)
            on_device = data.to_device(batch, device)
            losses = {} if needs_global_batch(task) else data.losses(task, model, on_device)
            counted = data.count_units(task, [(batch, len(samples))])
            for head, loss in losses.items():
                sums[head] = sums.get(head, 0.0) + float(loss)
                units[head] = units.get(head, 0.0) + data.units_of(counted, head)
            if metrics:
                update(metrics, task.predict(model, on_device), on_device)
    means = {head: sums[head] / units[head] for head in sums if units[head]}
    values: dict[str, float] = {}
    if means:
        values["loss"] = sum(task.coefficients.get(head, 1.0) * mean for head, mean in means.items())
    if len(sums) > 1:
        values |= {f"loss/{head}": mean for head, mean in means.items()}
    if metrics and length > bad:
        values |= _numbers("", metrics.compute())
    return values | {"samples": length - bad, "bad": bad}


def evaluate_constants(
    task: Task,
    model: nn.Module,
    outputs: Sequence[Tensor],
    constants: Sequence[Sequence[Tensor]],
    config: Mapping[str, Any],
    device: torch.device,
    *,
    micro_batch: int = 64,
) -> tuple[list[dict[str, float]], float]:
    """The metrics of a model with constant outputs, for each of several constants, in one pass over the data.

    Args:
        model: returns `outputs`.
        constants: the values that `outputs` get in turn. Afterwards they are restored.

    Returns:
        The metrics by constant, and the units of the data; those of the head with the most.
    """
    samples_of: Any = task.eval_data()
    fitted, units = [output.detach().clone() for output in outputs], dict[str, float]()
    collections = [_metrics(task) for _ in constants]
    model.eval()
    with torch.no_grad(), autocast(config, device):
        for start in range(0, len(samples_of), micro_batch):
            samples = _read(task, samples_of, range(start, min(start + micro_batch, len(samples_of))), config)
            if not samples:
                continue
            batch = task.collate(samples)
            for head, count in data.count_units(task, [(batch, len(samples))]).items():
                units[head] = units.get(head, 0.0) + count
            on_device = data.to_device(batch, device)
            for (metrics, update), constant in zip(collections, constants, strict=True):
                for output, value in zip(outputs, constant, strict=True):
                    output.copy_(value)
                if metrics:
                    update(metrics, task.predict(model, on_device), on_device)
        for output, value in zip(outputs, fitted, strict=True):
            output.copy_(value)
    values = [_numbers("", metrics.compute()) if metrics else {} for metrics, _ in collections]
    return values, max(units.values(), default=0.0)


def predict_model(
    task: Task, model: nn.Module, config: Mapping[str, Any], device: torch.device
) -> list[tuple[Any, Any]]:
    """(raw sample, output) for each evaluation sample. Each sample is its own batch."""
    samples_of: Any = task.eval_data()
    pairs = []
    model.eval()
    with torch.no_grad(), autocast(config, device):
        for index in range(len(samples_of)):
            batch = data.to_device(task.collate(_read(task, samples_of, [index], config)), device)
            pairs.append((samples_of[index], _of_the_only_sample(task.predict(model, batch))))
    return pairs


def trained_model(task: Task, folder: str, config: Mapping[str, Any], device: torch.device) -> nn.Module:
    """The task's model with the weights of the newest checkpoint in `folder`."""
    torch.manual_seed(config["seed"])
    model = task.model().to(device)
    checkpoint = newest(folder)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} has no checkpoint")
    load_trained_weights(checkpoint, model)
    return model


def autocast(config: Mapping[str, Any], device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context in which a forward pass has the number formats of the config's `precision`."""
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if config["precision"] not in formats:
        return contextlib.nullcontext()
    return torch.autocast(device.type, formats[config["precision"]])


def _read(task: Task, samples_of: Any, indices: Any, config: Mapping[str, Any]) -> list[Any]:
    skip = config["data"]["on_error"] != "raise"
    return data.read(task, samples_of, indices, epoch=0, training=False, seed=config["seed"], skip=skip)


def _metrics(task: Task) -> tuple[Any, Any]:
    """A collection of the task's metrics, or None, and the function that updates it."""
    from torchmetrics import Metric, MetricCollection

    returned: Any = task.metrics()
    update: Any = update_from_pair
    if isinstance(returned, Metrics):
        returned, update = returned.metrics, returned.update
    if isinstance(returned, MetricCollection):  # groups would update one metric for several
        named: dict[str, Any] = dict(returned.items(keep_base=True, copy_state=False))
        returned = MetricCollection(named, prefix=returned.prefix, postfix=returned.postfix, compute_groups=False)
    elif isinstance(returned, Metric):
        returned = MetricCollection([returned], compute_groups=False)
    elif isinstance(returned, Mapping):
        returned = MetricCollection(dict(returned), compute_groups=False)
    if returned is not None:
        returned.reset()
    return returned, update


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The numbers in the results of metrics, by name: those of a vector or a dict under `name/0` or `name/key`."""
    if isinstance(value, Mapping):
        found: dict[str, float] = {}
        for key, item in value.items():
            found |= _numbers(f"{name}/{key}" if name else str(key), item)
        return found
    if isinstance(value, tuple | list) or (isinstance(value, Tensor) and value.ndim > 1):
        return {}  # such as the points of a curve
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}/{place}": float(item) for place, item in enumerate(value)}
    return {name: float(value)}


def _of_the_only_sample(output: Any) -> Any:
    """The part of a one-sample batch's output that belongs to the sample."""
    if isinstance(output, Mapping):
        return {key: _of_the_only_sample(value) for key, value in output.items()}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: _of_the_only_sample(getattr(output, field.name)) for field in dataclasses.fields(output)}
    if isinstance(output, tuple):
        return tuple(_of_the_only_sample(value) for value in output)
    if output is None:
        return None
    return output[0].detach().cpu() if isinstance(output, Tensor) else output[0]
