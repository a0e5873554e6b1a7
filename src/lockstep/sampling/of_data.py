"""Find the order of the training data in the data set and the config."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Sampler, Subset

from lockstep.core.config.sections import RunConfig
from lockstep.core.data.dataset import LABELS, member_of
from lockstep.core.data.order import Order, StepPlan
from lockstep.core.errors import DataError, UsageError, number_of
from lockstep.sampling.checked import CheckedOrder
from lockstep.sampling.weighted import WeightedSampler, checked_weights
from lockstep.streams.stream import Stream
from lockstep.streams.stream import check as check_stream

_ONE_ATTRIBUTE = (
    "give the training data one of `order`, `sample_weights` and data.balance; lockstep_recipes.Shards has an order: "
    "set `data.order = lockstep.WeightedSampler(weights)` instead, which does not read neighbouring samples together"
)
_ABSENT = object()


def order_of(config: RunConfig, data: Any) -> Order | None:
    """The order that draws the samples of an epoch of the training data. None: an epoch has each sample once.

    Raises:
        UsageError: the data set and the config contradict each other, or the order is invalid.
        DataError: the weights, the labels or the order are wrong.
    """
    if isinstance(data, Stream):
        check_stream(config, data)
        return data.order
    own, weights = member_of(data, "order"), _weights_of(data)
    if own is None:
        _refuse_hidden_orders(data)
    balance, count = config.data.balance, config.data.samples_per_epoch
    given = {"`order`": own, "`sample_weights`": weights, f"data.balance={balance}": balance}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} are both given", where="the training data", remedy=_ONE_ATTRIBUTE)
    if count is not None and (not names or own is not None):
        what = "samples are not drawn by weights" if not names else "the order of the data set has its own length"
        remedy = "remove it, or draw samples by weights: data.balance=label, or the attribute `sample_weights`"
        raise UsageError(what, where="data.samples_per_epoch", remedy=remedy)
    samples = len(data)
    if not names or not samples:  # an empty data set is refused later
        return None
    name = "weighted sampling"
    if balance is not None:
        own, name = WeightedSampler(_equal(labels_of(data)), count), f"weighted sampling by {balance}"
    elif own is None:
        own = WeightedSampler(weights, count)
    _refuse_samplers(own)
    if not isinstance(own, WeightedSampler):
        name = f"order of the data set, {type(own).__name__}"
    elif len(own.weights) != samples:
        what = f"there are {number_of(len(own.weights), 'weight')}, but {number_of(samples, 'sample')}"
        raise DataError(what, where="the training data", remedy="give one weight for each sample")
    order = CheckedOrder(own, samples, name)
    order.check(config.seed)
    return order


def lines(plan: StepPlan) -> list[str]:
    """A line for the log, if an epoch does not have each sample once."""
    order = plan.order
    if not isinstance(order, CheckedOrder):
        return []
    return [f"{order.name}: an epoch has {order.length:,} draws of {order.samples:,} samples"]


def _weights_of(data: Any) -> Any:
    """The attribute `sample_weights`, also of the data inside a `Subset` or a `ConcatDataset`. None: there is none."""
    found = member_of(data, "sample_weights")
    if found is None and isinstance(data, Subset):
        inner = _weights_of(data.dataset)
        return None if inner is None else checked_weights(inner)[np.asarray(data.indices, dtype=np.int64)]
    if found is None and isinstance(data, ConcatDataset):
        parts = [_weights_of(part) for part in data.datasets]
        if any(part is not None for part in parts):
            if any(part is None for part in parts):
                remedy = "give weights to all of them, or set `sample_weights` of the ConcatDataset"
                raise UsageError("not all data sets have `sample_weights`", where="ConcatDataset", remedy=remedy)
            return np.concatenate([checked_weights(part) for part in parts])
    return found


def _refuse_hidden_orders(data: Any) -> None:
    inside = [data.dataset] if isinstance(data, Subset) else data.datasets if isinstance(data, ConcatDataset) else []
    for part in inside:
        order = member_of(part, "order")
        if order is not None and not getattr(order, "is_permutation", False):
            what = (
                f"the {type(part).__name__} inside a {type(data).__name__} has an `order`, which uses its own indices"
            )
            remedy = f"set `order` of the {type(data).__name__}, or remove it"
            raise UsageError(what, where="the training data", remedy=remedy)
        _refuse_hidden_orders(part)


def _refuse_samplers(order: Any) -> None:
    if isinstance(order, Sampler):
        remedy = (
            "for WeightedRandomSampler(weights, num_samples), write lockstep.WeightedSampler(weights, num_samples); "
            "for your own sampler, write a class with `length` and __call__(positions, *, seed, epoch): "
            "lockstep --explain sampling"
        )
        what = f"it is a {type(order).__name__}, a torch sampler, which returns samples one after another: ranks "
        what += "and resumed runs cannot query a position"
        raise UsageError(what, where="the attribute `order` of the training data", remedy=remedy)


def labels_of(data: Any) -> npt.NDArray[Any]:
    """The label of each sample: (samples,).

    They are the attribute `labels` or `targets` of the data set, as in torchvision, or `sample_labels` if those have a
    different meaning.

    Raises:
        UsageError: the labels are unknown, or are not one label per sample.
    """
    if isinstance(data, Subset):
        return labels_of(data.dataset)[np.asarray(data.indices, dtype=np.int64)]
    name = next((name for name in LABELS if member_of(data, name, _ABSENT) is not _ABSENT), None)
    found = member_of(data, name) if name is not None else None
    remedy = "set the attribute `labels` of the data set to an array of one label for each sample, or `sample_weights` "
    remedy += "to weights; data.balance is for data with one class for each sample"
    if found is None:
        what = (
            f"the labels of the samples are unknown: {type(data).__name__} has no attribute with one label per sample"
        )
        raise UsageError(what, where="data.balance", remedy=remedy)
    try:
        labels = np.asarray(found.detach().cpu() if hasattr(found, "detach") else found)
    except (TypeError, ValueError) as error:
        what = f"`{name}` of {type(data).__name__} is not an array: {error}"
        raise UsageError(what, where="data.balance", remedy=remedy) from error
    if labels.dtype.kind == "U" and any(not isinstance(one, str) for one in found):  # 1 and "1" would be one label
        what = f"`{name}` of {type(data).__name__} mixes texts and other values"
        raise UsageError(what, where="data.balance", remedy=remedy)
    if labels.shape != (len(data),) or labels.dtype.kind not in "biuUSO":
        what = f"`{name}` of {type(data).__name__} has the shape {labels.shape} and the type {labels.dtype}; expected: "
        raise UsageError(f"{what}one label for each of {len(data):,} samples", where="data.balance", remedy=remedy)
    if labels.dtype.kind == "O":
        _check_objects(labels, f"`{name}` of {type(data).__name__}")
    return labels


def _check_objects(labels: npt.NDArray[Any], what: str) -> None:
    """Raise UsageError if labels are missing, or cannot be counted because they cannot be sorted."""
    missing = [index for index, label in enumerate(labels) if label is None or _is_nan(label)]
    if missing:
        remedy = "leave out these samples (torch.utils.data.Subset), or give them a label, such as -1 or 'none'"
        raise UsageError(
            f"{what} has no label for {len(missing):,} of {len(labels):,} samples: sample {missing[0]} has "
            f"{labels[missing[0]]!r}",
            where="data.balance",
            remedy=remedy,
        )
    kinds = ", ".join(sorted({type(label).__name__ for label in labels}))
    try:
        np.unique(labels)
    except TypeError as error:
        remedy = "give all labels one type that can be sorted: numbers or texts"
        text = f"{what} has labels that cannot be sorted, of the types {kinds}: {error}"
        raise UsageError(text, where="data.balance", remedy=remedy) from error


def _is_nan(label: Any) -> bool:
    return isinstance(label, float) and math.isnan(label)


def _equal(labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Weights that draw each label equally often: 1 / number of samples of the label."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    found: npt.NDArray[np.float64] = 1.0 / counts[codes]
    return found
