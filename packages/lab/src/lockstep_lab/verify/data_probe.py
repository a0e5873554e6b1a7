"""Data that make a metric too good: samples in both data sets, labels among inputs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.parallel.world import join_world
from lockstep.core.task import Task
from lockstep.parts.digest import digest_of_batch
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_lab.verify.reference import data

_SAMPLES, _LONGEST_S = 2000, 1.0  # of each data set; reading images may take long
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
