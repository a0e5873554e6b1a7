"""metric_arrays.jsonl: metrics of two or more dimensions, such as confusion matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.core import run_folder
from lockstep.core.writer import Writer
from lockstep.parts.json_lines_file import JsonLinesFile
from lockstep.parts.plain import is_tensor

FILE = run_folder.METRIC_ARRAYS


class MetricArrays(Writer):
    """Appends, for each evaluation, the tensors of two or more dimensions among the metrics. Scalars are left out.

    The file is created with the first such tensor. Objects of later steps, which a killed process left, are dropped.

    Args:
        folder: the run directory.
        tell: reports dropped damaged lines.
    """

    name = FILE

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.path, self.tell = folder / FILE, tell

    def record(self, entry: Mapping[str, Any]) -> None:
        """Take the `step` of an evaluation, and its metrics by name."""
        arrays = {name: value for name, value in entry.items() if is_tensor(value) and value.ndim > 1}
        if not arrays:
            return
        file = JsonLinesFile(self.path, last_step=entry["step"] - 1)
        try:
            if file.note:
                self.tell(file.note)
            file.append({"step": entry["step"], **arrays})
        finally:
            file.close()
