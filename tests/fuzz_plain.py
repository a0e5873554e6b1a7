"""The training that a `Case` stands for, in plain torch: one process, the whole global batch at once, no engine.

It is written from docs/contract.md, docs/step.md and docs/logs.md. From the package it takes only the order of the
samples and their seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from lockstep.core.data.order import derive_seed, permute
from tests.fuzz_case import Case
from tests.fuzz_data import seed_all
from tests.fuzz_tasks import FuzzTask, task_of

Row = dict[str, float]
NORM = "train/grad_norm"


@dataclass
class Result:
    """What a training must give.

    weights: final weights by name. rows: entries of the log; a name with `?` may be missing.
    applied: number of updates that changed weights. evaluation, predictions: with the weights that were saved last; the
    prediction of a sample that cannot be read is None.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    applied: int = 0
    evaluation: Row = field(default_factory=dict)
    predictions: list[dict[str, torch.Tensor] | None] = field(default_factory=list)


@dataclass
class Window:
    """What happened since the last entry of the log. norm: of the last update's gradient."""

    sums: dict[str, float] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)
    bad: int = 0
    norm: float | None = None


class Averages:
    """The exponential moving average of a model's weights."""

    def __init__(self, model: torch.nn.Module, decay: float | None) -> None:
        self.model, self.decay = model, decay
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, number: int) -> None:
        """Add the weights after update `number`, counted from 1."""
        if self.decay is not None:
            decay = min(self.decay, (1 + number) / (10 + number))
            for value, parameter in zip(self.values, self.model.parameters(), strict=True):
                value.mul_(decay).add_(parameter.detach(), alpha=1 - decay)

    def swap(self) -> None:
        """Exchange weights and averages, where there are averages."""
        if self.decay is not None:
            for value, parameter in zip(self.values, self.model.parameters(), strict=True):
                kept = parameter.detach().clone()
                parameter.data.copy_(value)
                value.copy_(kept)


def train_plainly(case: Case) -> Result:
    """The result of the whole run."""
    seed_all(case.seed)
    task = task_of(case)
    data, evaluation = task.train_data(), task.eval_data()
    seed_all(case.seed)
    model = task.model().train()
    optimizer, averages = optimizer_of(case, model), Averages(model, case.ema)
    result, window = Result(), Window()
    for step in range(case.stop):
        for name, parameter in model.named_parameters(remove_duplicate=False):  # each name of a tied weight counts
            if fnmatch(name, case.unfreeze) and (case.unfreeze_step or case.unfreeze_epoch):
                parameter.requires_grad_(
                    step >= max(case.unfreeze_step, math.ceil(case.unfreeze_epoch * case.steps_per_epoch))
                )
        indices, epoch = global_batch(case, step)
        loss = gradient(case, task, model, data, indices, epoch, window)
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter in trained:
                if parameter.grad is None:  # a head that is a constant is as a sum over nothing
                    parameter.grad = torch.zeros_like(parameter)
            window.norm = float(torch.nn.utils.clip_grad_norm_(trained, case.clip_norm or math.inf))
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * rate(case, result.applied)
            optimizer.step()
            result.applied += 1
            averages.update(result.applied)
        done = step + 1
        if done % case.log_every == 0 or done == case.stop:
            row = entry(case, done, window, optimizer, done - result.applied)
            # Steps that log have a norm, and so do all steps that clip. This update was before such a step.
            result.rows.append(
                row
                if loss is not None
                else {f"{name}?" if name == NORM else name: value for name, value in row.items()}
            )
            window = Window(norm=window.norm)
        if case.eval_every and (done % case.eval_every == 0 or done == case.stop):
            averages.swap()
            result.rows.append(
                {
                    "step": done,
                    "epoch": round(done / case.steps_per_epoch, 4),
                    **evaluate(case, task, model, evaluation),
                }
            )
            averages.swap()
    result.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    averages.swap()
    if case.afterwards == "evaluate":
        result.evaluation = {
            name.removeprefix("eval/"): value for name, value in evaluate(case, task, model, evaluation).items()
        }
    if case.afterwards == "predict":
        result.predictions = predict(case, task, model, evaluation)
    return result


def global_batch(case: Case, step: int) -> tuple[list[int], int]:
    """Indices of the samples of a step, and their epoch."""
    epoch, within = divmod(step, case.steps_per_epoch)
    first = within * case.samples_per_step
    positions = range(first, min(first + case.samples_per_step, case.length))
    return permute(list(positions), case.length, case.seed, epoch).tolist(), epoch


def read(case: Case, task: FuzzTask, data: Any, indices: list[int], epoch: int, training: bool) -> list[Any]:
    """Those samples that can be read, each prepared under its own seed."""
    samples = []
    for index in indices:
        seed_all(derive_seed(case.seed, epoch, index))
        try:
            samples.append(task.prepare(data[index], epoch, training))
        except Exception:
            assert case.on_error == "skip"
    return samples


def sums_and_units(
    task: FuzzTask, model: torch.nn.Module, samples: list[Any]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """By head; nothing where there is no unit, which moves nothing: neither weights nor what BatchNorm keeps."""
    batch = task.collate(samples)
    weights = task.weight(batch)
    units = weights if isinstance(weights, dict) else {"loss": weights}
    if weights is not None and not any(map(float, units.values())):
        return {}, {}
    losses = task.loss(model, batch)
    sums = losses if isinstance(losses, dict) else {"loss": losses}
    return sums, {head: float(len(samples) if weights is None else units[head]) for head in sums}


def gradient(
    case: Case, task: FuzzTask, model: torch.nn.Module, data: Any, indices: list[int], epoch: int, window: Window
) -> torch.Tensor | None:
    """The loss whose gradient the step takes; None where the global batch has no unit. Adds to the window."""
    samples = read(case, task, data, indices, epoch, training=True)
    window.bad += len(indices) - len(samples)
    if not samples:
        return None
    sums, units = sums_and_units(task, model, samples)
    if not units:
        return None
    factors = task.coefficients
    total = torch.zeros((), dtype=torch.float64)
    for head, value in sums.items():
        window.sums[head] = window.sums.get(head, 0.0) + float(value.detach())
        window.units[head] = window.units.get(head, 0.0) + units[head]
        total = total + factors.get(head, 1.0) * (value / units[head] if units[head] else 0.0 * value)
    return total


def means(case: Case, sums: dict[str, float], units: dict[str, float], name: str) -> Row:
    """The total loss and, where there are several heads, theirs; nothing for heads without units."""
    factors = {head.name: 1.0 if head.coefficient is None else head.coefficient for head in case.all_heads}
    by_head = {head: sums[head] / units[head] for head in sums if units[head]}
    if not by_head:
        return {}
    row = {f"{name}/loss": sum(factors[head] * mean for head, mean in by_head.items())}
    return row | ({f"{name}/loss/{head}": mean for head, mean in by_head.items()} if len(case.all_heads) > 1 else {})


def entry(case: Case, step: int, window: Window, optimizer: torch.optim.Optimizer, skipped: int) -> Row:
    """A line of the log."""
    row = {"step": step, "epoch": round(step / case.steps_per_epoch, 4), "train/skipped": skipped}
    row |= means(case, window.sums, window.units, "train")
    row["train/lr"] = optimizer.param_groups[0]["lr"]
    if case.group_lr:
        row |= {f"train/lr/{group['name']}": group["lr"] for group in optimizer.param_groups}
    row |= {NORM: window.norm} if window.norm is not None else {}
    return row | ({"data/bad": window.bad} if window.bad else {})


def evaluate(case: Case, task: FuzzTask, model: torch.nn.Module, data: Any) -> Row:
    """Every sample once, in the model's evaluation mode."""
    model.eval()
    samples = read(case, task, data, list(range(case.eval_length)), 0, training=False)
    row: Row = {"eval/samples": len(samples), "eval/bad": case.eval_length - len(samples)}
    if samples:
        with torch.no_grad():
            sums, units = sums_and_units(task, model, samples)
        row |= means(case, {head: float(value) for head, value in sums.items()}, units, "eval")
    model.train()
    return row


def predict(case: Case, task: FuzzTask, model: torch.nn.Module, data: Any) -> list[dict[str, torch.Tensor] | None]:
    """Outputs of one sample after the other."""
    model.eval()
    found: list[dict[str, torch.Tensor] | None] = []
    for index in range(case.eval_length):
        samples = read(case, task, data, [index], 0, training=False)
        with torch.no_grad():
            output = task.predict(model, task.collate(samples)) if samples else None
        found.append(
            output and {"outputs": output["outputs"][0], "sum": output["more"][0][0], "index": output["more"][1][0]}
        )
    return found


def optimizer_of(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    """As docs/config.md says."""
    scale = {"none": 1.0, "linear": case.samples_per_step / 8, "sqrt": math.sqrt(case.samples_per_step / 8)}[
        case.lr_scaling
    ]
    top = [parameter for name, parameter in model.named_parameters() if name.startswith("out") and case.group_lr]
    rest = [parameter for name, parameter in model.named_parameters() if not (name.startswith("out") and case.group_lr)]
    decay = {} if case.weight_decay is None else {"weight_decay": case.weight_decay}
    groups = [{"params": top, "name": "top", "lr": case.group_lr * scale, "weight_decay": 0.0}] if case.group_lr else []
    groups.append({"params": rest, "name": "default", "lr": case.lr * scale, **decay})
    for group in groups:
        group["base"] = group["lr"]
    if case.optimizer == "AdamW":
        return torch.optim.AdamW(groups)
    return torch.optim.SGD(groups, momentum=0.9 if case.optimizer == "momentum" else 0.0)


def rate(case: Case, update: int) -> float:
    """Factor of the learning rate for an update, counted from 0."""
    if case.schedule == "step":
        shape = 0.5 ** (update // case.steps_per_epoch)
    else:
        done = min(1.0, max(0, update - case.warmup) / max(1, case.stop - case.warmup))
        falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[case.schedule]
        shape = falling if case.schedule == "constant" else case.end_factor + (1 - case.end_factor) * falling
    return shape * min(1.0, (update + 1) / case.warmup) if case.warmup else shape
