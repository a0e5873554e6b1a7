"""metrics.jsonl: one flat JSON object per entry."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.writer import RunInfo, Writer
from lockstep.parts.json_lines_file import JsonLinesFile


class JsonLines(Writer):
    """Appends entries to metrics.jsonl. The first entry drops those of later steps, which a killed process left: if the
    checks before the first step fail, they stay."""

    name = "metrics.jsonl"
    files = ("metrics.jsonl",)

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.file = JsonLinesFile(run.folder / "metrics.jsonl", last_step=run.first_step)
        self.note = self.file.note

    def record(self, entry: Mapping[str, float]) -> None:
        self.file.append(entry)

    def close(self) -> None:
        self.file.close()
