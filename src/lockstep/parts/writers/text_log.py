"""train.log: one line per entry and message, for people."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import lockstep
from lockstep.core.writer import RunInfo, Writer
from lockstep.parts.entry_line import entry_line


class TextLog(Writer):
    """Appends lines, each with the time, to train.log. Every start begins with a line on versions and ranks."""

    name = "train.log"
    files = ("train.log",)

    def __init__(self, run: RunInfo) -> None:
        import torch

        super().__init__(run)
        self.file = (run.folder / "train.log").open("a", buffering=1)
        self.message(
            f"lockstep {lockstep.__version__}, torch {torch.__version__}, "
            f"{run.ranks} on {run.device}, from step {run.first_step}"
        )

    def record(self, entry: Mapping[str, float]) -> None:
        self.message(entry_line(entry, self.run.last_step))

    def message(self, text: str) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.file.write(f"{now}  {text}\n")

    def close(self) -> None:
        self.file.close()
