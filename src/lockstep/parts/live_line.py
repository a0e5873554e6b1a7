"""A line that is rewritten in place, for outputs that are not terminals: the cell of a notebook."""

from __future__ import annotations

import sys

VARIABLE = "LOCKSTEP_LIVE_LINE"
"""Environment variable: set if a notebook shows stdout; it restarts a line after a carriage return."""


class LiveLine:
    """Shows a text as the last line, below all that is printed with `above`."""

    def __init__(self) -> None:
        self.file = sys.stdout
        self.text = ""

    def show(self, text: str) -> None:
        """Replace the line."""
        self.file.write(f"\r{text.ljust(len(self.text))}")  # blanks cover the end of a longer line
        self.file.flush()
        self.text = text

    def above(self, text: str) -> None:
        """Print lines above the line, which stays the last."""
        line, first = self.text, text.partition("\n")[0]
        rest = text[len(first) :]
        self.show(first)
        self.file.write(f"{rest}\n")
        self.text = ""
        if line:
            self.show(line)

    def close(self) -> None:
        """End the line. Later output follows below it."""
        if self.text:
            self.file.write("\n")
            self.file.flush()
        self.text = ""
