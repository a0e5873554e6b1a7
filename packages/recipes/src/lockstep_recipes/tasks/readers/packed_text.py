"""Many short texts in two arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class PackedText:
    """A sequence of texts, such as a million file names.

    Forked loader workers share the two arrays. They would copy a list of `str` page by page, because reading a `str`
    writes its reference count.

    Args:
        texts: any text that a file name may be, even if it is not UTF-8.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self.letters: npt.NDArray[Any] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        """The concatenated texts: (bytes,) uint8."""
        self.ends: npt.NDArray[Any] = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        """The end of each text: (texts,)."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return self.letters[start : self.ends[index]].tobytes().decode("utf-8", "surrogateescape")
