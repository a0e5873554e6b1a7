"""Observes means that an evaluation computes and integers that are divided: a mean of means may not be the mean."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from typing import Any

import torch

from lockstep_audit.observe import digests, gathered_evaluation, places, quotients, torch_state
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
SCORES = (
    *("f1_score", "fbeta_score", "precision_score", "recall_score", "precision", "recall", "jaccard_score"),
    *("roc_auc_score", "auroc", "average_precision_score", "average_precision", "auprc", "balanced_accuracy_score"),
    *("r2_score", "explained_variance_score", "explained_variance", "root_mean_squared_error", "median_absolute_error"),
    *("jaccard_index", "matthews_corrcoef", "cohen_kappa_score", "cohen_kappa", "pearson_corrcoef"),
)
"""Functions of libraries of metrics whose result for all samples is not the mean of those for parts."""
_MOST, _FEW = 512, 8
_CLOSE, _FAR = 1e-5, 1e-4
_means: dict[str, list[tuple[torch.Tensor, int]]] = defaultdict(list)
"""Since the last backward pass, by line: each mean, and over how many numbers it was taken."""
_weighted: set[str] = set()
summed: Registry[list[str | int] | None] = Registry()
"""Integers that were summed over ranks, and where."""


def loss(input: Any, target: Any = None, *arguments: Any, **named: Any) -> After:
    """A loss of torch.nn.functional outside training. In training: the class weights, and where the loss is."""
    global _last_loss, _last_labels
    recorder.guard("gathered rows", gathered_evaluation.compared, input, target)
    if torch.is_grad_enabled():
        is_sampled = recorder.is_sampled(recorder.counts.optimizer_steps)
        weight = {"weight": arguments[0]} if arguments else {}
        _last_loss, _last_labels = places.here(), _counted(target, **weight, **named) if is_sampled else {}
        recorder.guard("labels of gathered features", _note_labels, input, target, _last_loss)
        _note_weights(named.get("weight") if named.get("pos_weight") is None else named["pos_weight"], target)
    if torch.is_grad_enabled() or named.get("reduction", "mean") != "mean" or not isinstance(target, torch.Tensor):
        return None
    count = target.shape[0] if target.ndim else 1
    gathered_evaluation.counted(count, "a loss")
    if not target.is_floating_point():
        count = int((target != named.get("ignore_index", -100)).sum())
    return lambda result, error: _keep(result, count)


def _counted(
    target: Any, ignore_index: int = -100, reduction: str = "mean", weight: Any = None, **_: Any
) -> dict[str, float]:
    """The number of labels that a mean is taken over: `labels` if some are ignored, else `rows`; or of a sum: `summed`.

    With class weights, the mean is divided by `weights`, those of the labels.
    """
    if reduction != "mean" or not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
        return {"summed": target.numel()} if reduction == "sum" and isinstance(target, torch.Tensor) else {}
    if target.device.type != "cpu":
        return {}
    is_counted = target != ignore_index
    counted = int(is_counted.sum())
    told: dict[str, float] = {"labels" if counted < target.numel() else "rows": counted}
    if type(weight) is torch.Tensor and weight.ndim == 1 and weight.device.type == "cpu":
        told["weights"] = round(float(weight.detach()[target[is_counted]].sum()), 3)
    return told


def _note_weights(weight: Any, target: Any) -> None:
    """Record class weights once for each line. Weights of single samples may differ by rank."""
    at = places.here() if isinstance(weight, torch.Tensor) and weight.ndim == 1 else None
    if at is not None and str(at) not in _weighted and isinstance(target, torch.Tensor):
        _weighted.add(str(at))
        if weight.shape != target.shape:
            recorder.emit("class_weights", at=at, digest=digests.of_tensors({"": weight})[""], classes=weight.numel())


def mean(tensor: Any, *arguments: Any, **named: Any) -> After:
    """Tensor.mean of all elements, outside training."""
    if torch.is_grad_enabled() or arguments or named or tensor.device.type != "cpu":
        return None
    count, of_quotients = tensor.numel(), mean_of_quotients(tensor)
    gathered_evaluation.counted(count, "mean()")
    return of_quotients or (lambda result, error: _keep(result, count))


def _keep(result: Any, count: int) -> None:
    if isinstance(result, torch.Tensor) and result.ndim == 0 and result.device.type == "cpu" and count:
        line = _means[str(places.here())]
        if len(line) < _MOST:
            line.append((result, count))


_last_loss: list[str | int] | None = None
_last_labels: dict[str, float] = {}


def last_labels() -> dict[str, float]:
    """The number of labels that the last loss in training averages, as in `_counted`. Empty: it is not such a mean."""
    return _last_labels


def last_loss() -> list[str | int] | None:
    """Where the last loss in training was computed."""
    return _last_loss


_arranged: Registry[list[str | int] | None] = Registry()
_labelled: set[str] = set()


def arranged(*_: Any, **__: Any) -> After:
    """torch.arange."""

    def after(result: Any, error: BaseException | None) -> None:
        if isinstance(result, torch.Tensor) and (at := places.here()):
            _arranged.put(result, at)

    return after


def _note_labels(output: Any, target: Any, at: list[str | int] | None) -> None:
    """Labels 0, 1, 2, ... of the rows of a rank, if the columns are those of all ranks: once for each line."""
    if not isinstance(target, torch.Tensor) or target.ndim != 1 or len(target) < 2 or output.ndim != 2:
        return
    rows, columns = output.shape
    if rows != len(target) or columns == rows or columns % rows or str(at) in _labelled:
        return
    world = torch.distributed.get_world_size() if torch_state.has_other_ranks() else 1
    if world > 1 and columns == rows * world:
        _labelled.add(str(at))
        first = int(target[0])
        if bool((target == torch.arange(first, first + len(target), device=target.device)).all()):
            recorder.emit("labels", at=_arranged.get(target) or at, first=first, rows=len(target))


def forget() -> None:
    """Training continues."""
    _means.clear()
    _ratios.clear()
    _divisions.clear()
    _curved.clear()
    _quotients.clear()
    _spreads.clear()
    quotients.forget()


_ratios: list[tuple[torch.Tensor, float | list[float]]] = []
_quotients: deque[tuple[list[float], list[float]]] = deque(maxlen=16)
"""Outside training: quotients of the elements of two vectors, and the divisors."""


def _note_quotients(vector: Any, other: Any) -> After:
    """Tensor / Tensor of two vectors, such as a quotient for each class."""
    is_few = vector.ndim == 1 and 1 < vector.numel() <= _MOST and vector.device.type == "cpu"
    if not is_few or vector.shape != other.shape:
        return None
    by = other.tolist()
    return lambda result, error: _quotients.append((result.tolist(), by)) if error is None else None


def mean_of_quotients(tensor: Any, *arguments: Any, **named: Any) -> After:
    """A mean over classes of quotients, perhaps without some classes."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.ndim != 1 or arguments or named:
        return None
    if tensor.device.type != "cpu":
        return None
    own = {repr(each) for each in tensor.tolist()} if _quotients and 1 < tensor.numel() <= _MOST else set()
    found = [by for values, by in reversed(_quotients) if own and own <= set(map(repr, values))]
    return (lambda result, error: _ratios.append((result, found[0])) if error is None else None) if found else None


_spreads: deque[tuple[torch.Tensor, str]] = deque(maxlen=16)


def spread(name: str, tensor: Any, *_: Any, **__: Any) -> After:
    """std and var of what has no gradient."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.device.type != "cpu":
        return None

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and result.numel() <= _MOST:
            _spreads.append((result.clone().flatten(), name))

    return after


def _spread_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The spread that a tensor holds, alone or stacked with other numbers for each feature."""
    for values, name in _spreads if 0 < tensor.numel() <= _FEW * _MOST and tensor.is_floating_point() else ():
        is_own = len(values) and tensor.numel() % len(values) == 0 and tensor.numel() // len(values) <= _FEW
        rows = tensor.detach().reshape(-1, len(values)) if is_own and bool((values % 1).any()) else None
        if rows is not None and bool((rows == values.to(rows.dtype)).all(1).any()):
            return {"value": float(values.sum()), "result_of": name}
    return {}


_divisions: deque[tuple[Any, list[str | int] | None]] = deque(maxlen=16)
"""Since the last backward pass: what the script divided a loss by, and where."""


def divided_at(by: float | None) -> list[str | int] | None:
    """Where the script last divided a loss by a number."""
    return next((at for other, at in reversed(_divisions) if float(other) == by), None)


_sums: deque[tuple[int, list[Any], int | None, Any, dict[str, Any]]] = deque(maxlen=16)
"""Counts that ranks summed or gathered: the step, the results, the version of a sum, the counts of the rank, and where
and with whom."""


def summed_counts(result: torch.Tensor, own: Any, **told: Any) -> None:
    """A sum over ranks of numbers that are not negative. `n /= world` afterwards leaves a mean: another version."""
    _sums.append((recorder.counts.optimizer_steps, [result], _version(result), own, told))


def gathered_counts(results: list[Any], own: Any, **told: Any) -> None:
    """A gather of numbers from each rank, which begins now: it fills `results` later."""
    _sums.append((recorder.counts.optimizer_steps, results, None, own, told))


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place."""
    return 0 if tensor.is_inference() else tensor._version


def has_summed() -> bool:
    """True if ranks have summed or gathered counts since the last step."""
    return bool(_sums) and _sums[-1][0] == recorder.counts.optimizer_steps


def summed_to(divisor: float) -> dict[str, Any] | None:
    """The sum over ranks since the last step that a loss is divided by, if this rank contributed only a part of it."""
    for step, results, version, own, told in reversed(_sums):
        if step == recorder.counts.optimizer_steps and version in (None, _version(torch.as_tensor(results[0]))):
            total = torch.stack([torch.as_tensor(each).detach().flatten() for each in results]).sum(0)
            is_it = total == torch.tensor(divisor).to(total.dtype)
            if bool((is_it & (torch.as_tensor(own).flatten() < total)).any()):
                return dict(told)
    return None


def divided(tensor: Any, other: Any = None, *_: Any, **__: Any) -> After:
    """Tensor / Tensor of two numbers, outside training. In training: where the script divides a loss."""
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.ndim:
        is_number = isinstance(other, (int, float)) or (isinstance(other, torch.Tensor) and other.numel() == 1)
        if is_number and recorder.is_sampled(recorder.counts.optimizer_steps) and places.is_by_user(sys._getframe(3)):
            _divisions.append((other, places.here()))
    if torch.is_grad_enabled() or type(tensor) is not torch.Tensor or type(other) is not torch.Tensor:
        return None  # fake tensors have no values
    if tensor.ndim and other.ndim:
        return _note_quotients(tensor, other)
    if tensor.ndim or other.ndim or other.device.type != "cpu" or len(_ratios) >= _MOST:
        return None
    by = float(other)
    return lambda result, error: _ratios.append((result, by)) if error is None else None


_curved: deque[tuple[Any, str]] = deque(maxlen=64)
"""Results of roots and exponentials of single numbers, outside training."""


def curved(name: str, number: Any, *_: Any, **__: Any) -> After:
    """exp and sqrt of one number."""
    if torch.is_grad_enabled() and isinstance(number, torch.Tensor) and number.requires_grad:
        return None
    if isinstance(number, torch.Tensor) and (number.ndim or number.device.type != "cpu"):
        return None
    return lambda result, error: _curved.append((result, name)) if error is None else None


def scored(name: str, one: Any = None, other: Any = None, *_: Any, sample_weight: Any = None, **__: Any) -> After:
    """A function of a library of metrics, which takes labels and predictions, in either order."""
    if torch.is_grad_enabled() and isinstance(other, torch.Tensor) and other.requires_grad:
        return None
    if sample_weight is None and hasattr(one, "__len__"):
        gathered_evaluation.counted(len(one), f"{name}()")
    return lambda result, error: _curved.append((result, name)) if getattr(result, "ndim", 0) == 0 else None


def about(tensor: torch.Tensor) -> dict[str, Any]:
    """The value of one number that ranks exchange. For a mean of means: how many means, and over how many numbers.

    Ranks may exchange the sum of the means together with their number.
    """
    if tensor.numel() in range(2, _FEW + 1) and tensor.device.type == "cpu" and not tensor.requires_grad:
        told: dict[str, Any]
        held = [float(each) for each in tensor.flatten()]
        found = [_mean_of(each / len(line), line) for each in held for line in _means.values() if len(line) in held]
        told = next(({"mean_of": each, "value": each["plain"]} for each in found if each), {})
        curves = [(value, name) for value in held for result, name in _curved if _is(result, value) and value % 1]
        told = told or next(({"value": value, "result_of": name} for value, name in curves), {})
        return told or _spread_of(tensor)
    if tensor.numel() != 1 or tensor.device.type != "cpu" or not tensor.is_floating_point() or tensor.requires_grad:
        return _spread_of(tensor) if tensor.device.type == "cpu" and not tensor.requires_grad else {}
    value = float(tensor)
    told = {"value": value}
    ratios = [by for result, by in _ratios if _is(result, value)]
    told |= {"ratio_of": ratios[-1]} if ratios else {}
    told["by_hand"] = quotients.divisors(value, tensor.dtype)
    curved = [name for result, name in _curved if value and _is(result, value)]
    told |= {"result_of": curved[-1]} if curved and abs(value - 1) > _CLOSE else _spread_of(tensor)
    for line in _means.values():
        most = told.get("mean_of", {}).get("means", 0)
        if len(line) > most and (own := _mean_of(value, line)):
            told["mean_of"] = own
    return told


def _is(result: Any, value: float) -> bool:
    return abs(float(result) - value) <= _CLOSE * abs(value)


def _mean_of(value: float, line: list[tuple[torch.Tensor, int]]) -> dict[str, Any] | None:
    """What is known about the means of a line, if a number is their mean."""
    values, counts = [float(each) for each, _ in line], [count for _, count in line]
    plain = sum(values) / len(values)
    if not value or abs(plain - value) > _CLOSE * abs(value):
        return None
    weighted = sum(each * count for each, count in zip(values, counts, strict=True)) / sum(counts)
    full = counts[:-1] or counts  # the last batch may be short
    told = {"means": len(line), "numbers": sum(counts), "least": min(full), "most": max(full), "last": counts[-1]}
    return told | {"plain": plain, "weighted": weighted, "unequal": abs(weighted - value) > _FAR * abs(value)}


def floor_divided(tensor: Any, other: Any = None, *_: Any, **__: Any) -> After:
    """Tensor // number, for a sum over ranks."""
    if isinstance(tensor, torch.Tensor) and isinstance(other, int) and summed.get(tensor) and other > 1:
        is_mean = other == torch.distributed.get_world_size()
        rest = bool((tensor % other).any())
        if is_mean and torch_state.has_other_ranks():
            recorder.emit("floor_division", limit=20, at=places.here(), divisor=other, remainder=rest)
    return None
