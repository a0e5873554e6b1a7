"""Data that make a metric too good: samples in both data sets, labels among inputs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.defaults import is_default
from lockstep.core.parallel.world import join_world
from lockstep.core.task import Task
from lockstep.parts.digest import digest_of_batch
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_lab.verify.reference import data

_SAMPLES, _LONGEST_S = 2000, 1.0  # of each data set; reading images may take long
_PREPARED, _EPOCHS = 8, 3  # samples, and their augmentations
_SCALED, _KEPT = 2.0, 0.05  # ratio of deviations; share of values that are the same in training
_FEWEST_OF_CLASS, _FEWEST = 5, 40  # with fewer samples, an input may determine the labels by chance


def probe_data(config: Mapping[str, Any]) -> list[str]:
    """Remarks about the data of a training. Each may be intended. Samples are prepared without augmentation."""
    trainer = Trainer(config, quiet=True)
    changes = TaskChanges(train_samples=_SAMPLES, eval_samples=_SAMPLES, no_augmentation=True)
    task = ComparableTask(task_of(trainer), changes)
    with join_world(trainer.config.device):
        training = list(_batches(task, task.train_data(), training=True))
        remarks = labels_among_inputs(training)
        evaluation = task.eval_data()
        return remarks + (
            [] if evaluation is None else overlap(training, list(_batches(task, evaluation, training=False)))
        )


def _batches(task: Task, samples: Any, *, training: bool) -> Iterator[Any]:
    """Samples of a data set, each as its own batch, for a second at most."""
    deadline = time.monotonic() + _LONGEST_S
    for index in range(len(samples)):
        for sample in data.read(task, samples, [index], epoch=0, training=training, seed=0, skip=True):
            yield task.collate([sample])
        if time.monotonic() > deadline:
            return


def other_preparation(config: Mapping[str, Any]) -> str:
    """A complaint if inputs are scaled differently for evaluations than in training; else empty.

    Augmentation keeps the mean and the deviation of inputs roughly, or it keeps some of their values, as masks do.
    """
    trainer = Trainer(config, quiet=True)
    task = ComparableTask(task_of(trainer), TaskChanges(train_samples=_PREPARED))
    if is_default(task.task.prepare):
        return ""
    with join_world(trainer.config.device):
        samples: Any = task.train_data()
        read = functools.partial(data.read, task, samples, range(len(samples)), seed=0, skip=True)
        plain = _inputs(task, read(epoch=0, training=False))
        trained = [_inputs(task, read(epoch=epoch, training=True)) for epoch in range(_EPOCHS)]
    pairs = [
        (one, other) for epoch in trained if len(epoch) == len(plain) for one, other in zip(plain, epoch, strict=True)
    ]
    if not pairs or any(one.ndim != other.ndim for one, other in pairs):
        return ""
    kept = [float(torch.isin(torch.unique(other), torch.unique(one)).double().mean()) for one, other in pairs]
    evaluated, augmented = (torch.cat([one.flatten() for one in side]) for side in zip(*pairs, strict=True))
    shift = abs(float(evaluated.mean() - augmented.mean()))
    small, large = sorted((float(evaluated.std()), float(augmented.std())))
    if not small or max(large / small / _SCALED, shift / large) < 1 or sum(kept) > _KEPT * len(kept):
        return ""
    return (
        f"inputs have mean {augmented.mean():.3g} and deviation {augmented.std():.3g} in training, but the same "
        f"samples have mean {evaluated.mean():.3g} and deviation {evaluated.std():.3g} in an evaluation. Likely cause: "
        "Task.prepare normalises them differently if training is false"
    )


def _inputs(task: Task, samples: Sequence[Any]) -> list[Tensor]:
    """The first tensor of several floating-point numbers of each sample; empty if a sample has none."""
    batches = [data.tensors(task.collate([sample])) for sample in samples]
    found = [[one.double() for one in batch if one.is_floating_point() and one.numel() > 3][:1] for batch in batches]
    return [one for (one,) in found] if all(found) else []


def overlap(training: Sequence[Any], evaluation: Sequence[Any]) -> list[str]:
    """A remark about evaluation samples that equal training samples. Each sample is a batch."""
    known = {digest_of_batch(batch) for batch in training if data.tensors(batch)}
    count = sum(digest_of_batch(batch) in known for batch in evaluation)
    if not count:
        return []
    return [
        f"{count} of {len(evaluation)} evaluation samples equal one of {len(training)} training samples: "
        "metrics on samples of the training data say nothing about new samples"
    ]


def labels_among_inputs(training: Sequence[Any]) -> list[str]:
    """A remark about a single input number that determines the label. Each sample is a batch of a tuple."""
    pairs = []
    for batch in training:
        tensors = data.tensors(batch)
        with contextlib.suppress(StopIteration):
            label = next(tensor for tensor in tensors if tensor.numel() == 1 and not tensor.is_floating_point())
            inputs = next(tensor for tensor in tensors if tensor.numel() > 1)
            pairs.append((inputs.flatten().double(), int(label)))
    if len(pairs) < max(_FEWEST, len(training)) or len({inputs.numel() for inputs, _ in pairs}) != 1:
        return []
    place = _determining(torch.stack([inputs for inputs, _ in pairs]), torch.tensor([label for _, label in pairs]))
    if place is None:
        return []
    return [f"number {place} of the inputs determines the label by itself, in each of {len(pairs)} samples"]


def _determining(inputs: Tensor, labels: Tensor) -> int | None:
    """The first column of `inputs` that has one value per label, and a different value for each label."""
    of_class = [inputs[labels == label] for label in torch.unique(labels)]
    if len(of_class) < 2 or min(map(len, of_class)) < _FEWEST_OF_CLASS:
        return None
    constant = torch.stack([(rows == rows[0]).all(dim=0) for rows in of_class]).all(dim=0)
    values = torch.stack([rows[0] for rows in of_class])
    for place in constant.nonzero().flatten().tolist():
        if len(torch.unique(values[:, place])) == len(of_class):
            return int(place)
    return None
