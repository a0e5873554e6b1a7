"""Weights & Biases: entries, images, reports of evaluations, and files."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.writer import FOLDER, RunInfo, Writer
from lockstep.parts.plain import plain


class WeightsAndBiases(Writer):
    """Sends the log to W&B. `WANDB_PROJECT`, `WANDB_MODE=offline` and W&B's other variables are respected.

    The project is `lockstep` unless `WANDB_PROJECT` names one. A resumed run continues the same W&B run.
    """

    name = "wandb"
    library = "wandb"
    in_own_process = True

    def __init__(self, run: RunInfo) -> None:
        import wandb

        super().__init__(run)
        self.id, _ = run.kept_id("wandb")
        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lockstep"),
            name=run.name,
            id=self.id,
            resume="allow",
            dir=run.folder / FOLDER,
            config=plain(run.config) | run.about(),
            tags=run.tags(),
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        if self.session.url:
            self.note = f"wandb: {self.session.url}"

    def record(self, entry: Mapping[str, float]) -> None:
        self.session.log(dict(entry), step=int(entry["step"]))

    def text(self, name: str, text: str, step: int) -> None:
        import wandb

        self.session.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def picture(self, name: str, picture: Any, step: int) -> None:
        import wandb

        self.session.log({name: wandb.Image(picture)}, step=step)

    def artifacts(self, paths: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{self.id}", type="run")
        for path in paths:
            name = str(path.relative_to(self.run.folder))
            artifact.add_dir(str(path), name=name) if path.is_dir() else artifact.add_file(str(path), name=name)
        self.session.log_artifact(artifact)

    def close(self) -> None:
        self.session.finish()
