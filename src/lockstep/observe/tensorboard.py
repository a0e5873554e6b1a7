"""TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes every entry's values as scalars over the step. The library is loaded at the first entry, after the first step.

    Args:
        folder: where event files go.
        resumed_at: what a dead run wrote after this step is hidden (TensorBoard's purge).
    """

    def __init__(self, folder: Path, resumed_at: int = 0) -> None:
        self.folder, self.resumed_at = folder, resumed_at
        self.writer: SummaryWriter | None = None

    def record(self, entry: dict[str, float]) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = self.resumed_at + 1 if self.resumed_at else None
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
        for name, value in entry.items():
            if name not in ("step", "time_s"):
                self.writer.add_scalar(name, value, int(entry["step"]))

    def progress(self, step: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
