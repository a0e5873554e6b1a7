"""The task of a verification. Checks read samples by index, so the first samples of a stream replace it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from lockstep.core.data.dataset import forward
from lockstep.core.task import Task
from lockstep.trainer.trainer import Trainer

MOST_OF_STREAM = 1000
"""The number of samples that replace a stream: the first ones."""


class FirstSamples(Dataset[Any]):
    """The first samples of a stream, by index. Each process reads them when it first needs one."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.length = stream, min(stream.length or MOST_OF_STREAM, MOST_OF_STREAM)

    @functools.cached_property
    def samples(self) -> list[Any]:
        """All of them."""
        return [self.stream[index] for index in range(self.length)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self.samples[index])  # `Task.prepare` may change a sample in place


def task_of(trainer: Trainer) -> Task:
    """The task of a trainer's config, with training data that have samples by index."""
    task = trainer.task()
    task.train_data = functools.partial(_by_index, task.train_data)  # type: ignore[method-assign]
    return task


def _by_index(train_data: Callable[[], Any]) -> Any:
    data = train_data()
    return data if forward(data) is None else FirstSamples(data)
