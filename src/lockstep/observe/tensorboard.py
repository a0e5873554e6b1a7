"""TensorBoard scalars."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes an entry's values as scalars over the step, as one event. The library is loaded at the first entry, after the first step.

    Args:
        folder: where event files go.
        resumed_at: what a dead run wrote after this step is hidden (a session start, as SummaryWriter's purge_step writes it).
    """

    def __init__(self, folder: Path, resumed_at: int = 0) -> None:
        self.folder, self.resumed_at = folder, resumed_at
        self.writer: Any = None

    def record(self, entry: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self.writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self.writer = EventFileWriter(str(self.folder))
            if self.resumed_at:
                start = SessionLog(status=SessionLog.START)
                self.writer.add_event(Event(wall_time=time.time(), step=self.resumed_at + 1, session_log=start))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.items() if name not in ("step", "time_s")]
        self.writer.add_event(Event(wall_time=time.time(), step=int(entry["step"]), summary=Summary(value=values)))

    def progress(self, step: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
