"""TensorBoard scalars."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

_numbers = itertools.count()


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
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        tags = [name for name in entry if name not in ("step", "time_s")]
        values = [Summary.Value(tag=name, simple_value=entry[name]) for name in tags]
        if self.writer is None:
            self._open()
        self._add(Event(wall_time=time.time(), step=int(entry["step"]), summary=Summary(value=values)))

    def _open(self) -> None:
        """A new file. Not by EventFileWriter: its thread writes up to two minutes late, and prints its errors."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):08d}"
        self.writer = RecordWriter((self.folder / name).open("xb"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self.resumed_at:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=self.resumed_at + 1, session_log=start))

    def _add(self, event: Any) -> None:
        try:
            self.writer.write(event.SerializeToString())
            self.writer.flush()
        except OSError:  # what follows half an event cannot be read: the next one begins another file
            writer, self.writer = self.writer, None
            writer.close()
            raise

    def progress(self, step: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
