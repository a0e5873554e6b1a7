"""TensorBoard: scalars, hyperparameters, texts, images and the graph of the model."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from lockstep.core.writer import RunInfo, Writer
from lockstep.drawing import drawing
from lockstep.parts.plain import dumps

_numbers = itertools.count()


class TensorBoard(Writer):
    """Writes the values of an entry as scalars over the step, as one event, into the folder `tensorboard`.

    Images and texts are also events. A new run starts with its hyperparameters. The graph of the model has its own
    file, which is complete before the first event.

    The library is loaded with the first entry, after the first step. In a resumed run, TensorBoard hides what a killed
    process wrote after the first step: the file starts with a session start, as SummaryWriter's `purge_step` writes it.
    """

    name = "tensorboard"
    files = ("tensorboard",)

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.writer: Any = None

    def record(self, entry: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        tags = [name for name in entry if name not in ("step", "time_s")]
        values = [Summary.Value(tag=name, simple_value=entry[name]) for name in tags]
        self._add(Event(wall_time=time.time(), step=int(entry["step"]), summary=Summary(value=values)))

    def picture(self, name: str, picture: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width, _ = picture.shape
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=drawing.png(picture))
        summary = Summary(value=[Summary.Value(tag=name, image=image)])
        self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def text(self, name: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # in Markdown: verbatim
        tensor = TensorProto(dtype=DT_STRING, string_val=[indented.encode()])
        summary = Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])
        self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def graph(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        from lockstep.parts import graph

        graph.write(self.run.folder / "tensorboard", model, args, kwargs)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _open_file(self) -> None:
        """Begin a new file. EventFileWriter is not used: its thread writes up to 2 minutes late, and prints errors."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = self.run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):08d}"
        self.writer = RecordWriter((folder / name).open("xb"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self.run.first_step:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=self.run.first_step + 1, session_log=start))
        elif self.run.hyperparameters:
            self._add(Event(wall_time=time.time(), summary=self._hyperparameters()))

    def _hyperparameters(self) -> Any:
        """The start of a session for TensorBoard's page of hyperparameters. Its metrics are the scalars of the run."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in self.run.hyperparameters.items():
            if value is None:  # a default; text instead of a number would change the type of the column
                continue
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = value if isinstance(value, str) else dumps(value)
        data = plugin_data_pb2.HParamsPluginData(session_start_info=start, version=0)
        plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
        about = SummaryMetadata(plugin_data=plugin)
        return Summary(value=[Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=about)])

    def _add(self, event: Any) -> None:
        if self.writer is None:
            self._open_file()
        try:
            self.writer.write(event.SerializeToString())
            self.writer.flush()
        except OSError:  # TensorBoard reads nothing after half an event, so the next event starts a new file
            writer, self.writer = self.writer, None
            writer.close()
            raise
