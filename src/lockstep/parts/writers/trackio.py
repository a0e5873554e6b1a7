"""Trackio: entries, images, reports of evaluations, and files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.writer import RunInfo, Writer
from lockstep.parts.plain import plain


class Trackio(Writer):
    """Sends the log to Trackio: to a folder of this machine, or to `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL`.

    The project is `lockstep` unless `TRACKIO_PROJECT` names one. Trackio identifies runs by their names, so the name
    gets the end of an id. A resumed run continues the same Trackio run.
    """

    name = "trackio"
    library = "trackio"
    in_own_process = True

    def __init__(self, run: RunInfo) -> None:
        import trackio

        super().__init__(run)
        self.id, _ = run.kept_id("trackio", lambda: f"{run.name}-{secrets.token_hex(3)}")
        self.session = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "lockstep"),
            name=self.id,
            resume="allow",
            config=plain(run.config) | run.about() | {"tags": run.tags()},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def record(self, entry: Mapping[str, float]) -> None:
        self.session.log({name: value for name, value in entry.items() if name != "step"}, step=int(entry["step"]))

    def text(self, name: str, text: str, step: int) -> None:
        import trackio

        self.session.log({name: trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def picture(self, name: str, picture: Any, step: int) -> None:
        import trackio

        self.session.log({name: trackio.Image(picture)}, step=step)

    def artifacts(self, paths: Sequence[Path]) -> None:
        import trackio

        artifact = trackio.Artifact(f"run-{self.id}", type="run")
        for path in paths:
            name = str(path.relative_to(self.run.folder))
            artifact.add_dir(str(path), name=name) if path.is_dir() else artifact.add_file(str(path), name=name)
        trackio.log_artifact(artifact)

    def close(self) -> None:
        self.session.finish()
