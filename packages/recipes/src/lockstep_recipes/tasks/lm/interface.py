"""What the presenter, the model card and the export of a language model read of its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.core.task import Task
from lockstep_recipes.tasks.lm.data import PackedRows, Prompt
from lockstep_recipes.tasks.lm.documents import Corpus
from lockstep_recipes.tasks.lm.options import LmOptions
from lockstep_recipes.tasks.lm.stream import TextStream


class LmTask(Task):
    """A task with a tokenizer, two sources of documents, and a model that writes texts."""

    options: LmOptions
    corpus: Corpus
    eval_corpus: Corpus | None
    folder: Path | None
    """The folder with tokenizer and config that is kept with the run. None outside a run."""
    new_weights: list[str]
    """Names of the weights that the pretrained model lacks. Known after `model`."""
    parameters: int
    """Number of parameters. Known after `model`."""
    stream: TextStream | None
    """Prints the next text while it is written."""

    @property
    def config(self) -> Any:
        """The config of the model, as a transformers object."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The kind of the training texts: `plain`, `answers` or `chats`."""
        raise NotImplementedError

    def prompt(self, text: str, where: str = "") -> Prompt:
        """A prompt in the form of the training texts, as the model sees it."""
        raise NotImplementedError

    def decoded(self, written: Tensor) -> str:
        """The text of tokens, without negative ones."""
        raise NotImplementedError

    def train_data(self) -> PackedRows:
        raise NotImplementedError

    def eval_data(self) -> PackedRows | None:
        raise NotImplementedError
