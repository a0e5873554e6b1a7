"""Print the text of a single prompt to a terminal, piece by piece while the model writes it."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Protocol

from torch import Tensor, nn

from lockstep_recipes.tasks.lm import writing
from lockstep_recipes.tasks.readers.table import SUFFIXES

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would interpret them


def is_prompt(argument: str) -> bool:
    """True for an argument of `lockstep predict` that is a prompt rather than a file, a folder or standard input."""
    names_file = os.path.exists(argument) or (argument.endswith(SUFFIXES) and " " not in argument)
    return argument != "-" and not names_file


class TokenDecoder(Protocol):
    """Has a tokenizer of Hugging Face."""

    @property
    def tokenizer(self) -> Any: ...
    def decoded(self, written: Tensor, /) -> str: ...


class TextStream:
    """Writes a text to stdout, each character as soon as all of its bytes are available.

    `DecodeStream` of tokenizers returns the pieces. Together they are the text that `decode` returns for all tokens.
    (The TextStreamer of transformers restarts after each line break, and tokenizers such as Llama's then drop a space.)

    Args:
        task: has the tokenizer, at the latest when the model starts to write.
    """

    def __init__(self, task: TokenDecoder) -> None:
        self.task = task

    def write(self, model: nn.Module, ids: Tensor, mask: Tensor, draws: Tensor, **options: Any) -> Tensor:
        """Like `writing.write`, for a single prompt."""
        from tokenizers.decoders import DecodeStream

        pieces, backend, shown = DecodeStream(skip_special_tokens=True), self.task.tokenizer.backend_tokenizer, ""

        def put(token: Tensor) -> None:
            nonlocal shown
            if int(token) != writing.NOTHING:
                piece = pieces.step(backend, int(token)) or ""
                shown += piece
                _show(piece)

        written = writing.write(model, ids, mask, draws, **options, put=put)
        whole = self.task.decoded(written[0])
        _show((whole.removeprefix(shown) if whole.startswith(shown) else f"\n{whole}") + "\n")
        return written


def _show(text: str) -> None:
    sys.stdout.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
    sys.stdout.flush()
