"""Many short texts in two arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class PackedText:
    """A sequence of texts, such as a million file names.

    Forked loader workers share the two arrays. A list of `str` they would copy page by page: whoever reads a `str`
    writes its count of references.

    Args:
        texts: any text that a file name may be, also one that is not UTF-8.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self.letters: npt.NDArray[Any] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        """The texts, one behind the other: (bytes,) uint8."""
        self.ends: npt.NDArray[Any] = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        """Where each text ends: (texts,)."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return self.letters[start : self.ends[index]].tobytes().decode("utf-8", "surrogateescape")
