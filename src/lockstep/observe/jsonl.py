"""metrics.jsonl: one flat JSON object per log entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends entries to `path`. Entries of steps after `resumed_at` came from a run that died: they are dropped first."""

    def __init__(self, path: Path, resumed_at: int = 0) -> None:
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= resumed_at]
            if len(kept) < len(lines):
                new = path.with_name(f".{path.name}.new")
                new.write_text("".join(kept))
                new.replace(path)
        self.file = path.open("a", buffering=1)

    def record(self, entry: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(entry) + "\n")

    def progress(self, step: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        self.file.close()
