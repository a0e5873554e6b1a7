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
        if "memory/before_evaluation_mb" in entry:
            before, after = (entry[f"memory/{when}_evaluation_mb"] for when in ("before", "after"))
            self.message(
                f"memory around this evaluation: {before:,.0f} MiB before, {after:,.0f} MiB after; "
                f"evaluations took at most {entry['memory/evaluation_mb']:,.0f} MiB more"
            )

    def message(self, text: str) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.file.write(f"{now}  {text}\n")

    def close(self) -> None:
        self.file.close()
