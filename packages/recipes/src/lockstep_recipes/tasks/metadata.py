"""Base class for tasks that store with the run what they derive from their data and their model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import Dataset

from lockstep.core import atomic
from lockstep.core.errors import UsageError
from lockstep.core.foreign_errors import os_errors
from lockstep.core.task import Task


def keep(folder: Path, name: str, save: Callable[[Path], None]) -> None:
    """Write files to the folder that is kept with a run. Do nothing if they exist.

    Args:
        name: the name of one of the files.
        save: writes the files to a folder.

    Raises:
        UsageError: the folder cannot be written.
    """
    if (folder / name).exists():
        return
    try:
        with atomic.staged_folder(folder, replace=True) as staging, os_errors():
            save(staging)
    except OSError as error:
        remedy = "choose a different folder with --run-dir"
        raise UsageError(f"cannot write: {error.strerror}", where=str(folder), remedy=remedy) from error


class MetadataTask(Task):
    """A task with two sources, which stores with the run what it derived from the training source: `about`.

    Args:
        options: an object of `TaskOptions`.
        train, eval: the sources.
    """

    kept: ClassVar[str]
    """The name of the file that keeps `about`."""
    about_type: ClassVar[type[Any]]
    """A dataclass."""

    def __init__(self, options: Any, train: str, eval: str | None) -> None:
        self.options, self.train_source, self.eval_source = options, train, eval
        self.folder: Path | None = None
        """The folder that is kept with the run. None outside a run."""
        self.new_weights: list[str] = []
        """Names of the weights that the pretrained model lacks. Known after `model`."""
        self._trained = False

    def setup(self, folder: Path, trained: bool) -> None:
        """Keep `about` and the files of `save` in `folder`.

        Raises:
            DataError: the data cannot be used.
            UsageError: the folder cannot be written.
        """
        self._trained = trained
        if not (folder / self.kept).exists():
            found = json.dumps(asdict(self.to_keep()))

            def save(staging: Path) -> None:
                (staging / self.kept).write_text(found)
                self.save(staging)

            keep(folder, self.kept, save)
        self.folder = folder
        for name in ("about", "models", "decided"):  # read from the file, so that they are the same on all ranks
            self.__dict__.pop(name, None)

    def to_keep(self) -> Any:
        """The object that a new run stores."""
        return self.about

    def save(self, folder: Path) -> None:
        """Write what a new run stores in addition to `about`."""
        raise NotImplementedError

    @cached_property
    def about(self) -> Any:
        """The names of the classes or questions, and what the model expects of images."""
        if self.folder is not None:
            return self.about_type(**json.loads((self.folder / self.kept).read_text()))
        return self.learn()

    def learn(self) -> Any:
        """Derive it from the training data and the model, without a run.

        Raises:
            DataError: the training data cannot be read, or has too few classes.
        """
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        """Names of the classes or questions, in the order of the logits."""
        raise NotImplementedError

    def read(self, source: str, split: Any, names: list[str] | None) -> Any:
        """The data set of a source.

        Args:
            split: `train` or `eval`.
            names: the names of the training data. None: those of the source.
        """
        raise NotImplementedError

    @cached_property
    def _train(self) -> Any:
        return self.read(self.train_source, "train", self.names)

    @cached_property
    def _eval(self) -> Any:
        return None if self.eval_source is None else self.read(self.eval_source, "eval", self.names)

    def train_data(self) -> Dataset[Any]:
        data: Dataset[Any] = self._train
        return data

    def eval_data(self) -> Dataset[Any] | None:
        data: Dataset[Any] | None = self._eval
        return data
