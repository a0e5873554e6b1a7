"""MLflow: entries, images, reports of evaluations, and files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.writer import RunInfo, Writer
from lockstep.parts.plain import dumps

_AT_ONCE = 100  # parameters that the store accepts per call
_LONGEST = 6000  # characters of a parameter that the store accepts


class MLflow(Writer):
    """Sends the log to the store that `MLFLOW_TRACKING_URI` names, else to MLflow's own default.

    The experiment is `lockstep` unless `MLFLOW_EXPERIMENT_NAME` names one. A resumed run continues the same MLflow run.
    """

    name = "mlflow"
    library = "mlflow"
    in_own_process = True

    def __init__(self, run: RunInfo) -> None:
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        super().__init__(run)
        self.client: Any = MlflowClient()
        self.id, goes_on = run.kept_id("mlflow", self._new_run)
        if goes_on:
            self.client.update_run(self.id, status="RUNNING")
        about = run.about() | dict.fromkeys(run.tags(), "true")
        self.client.log_batch(self.id, tags=[RunTag(key, value) for key, value in about.items()])
        if not goes_on:  # the store refuses different values for the parameters of a run
            values = {key: _text(value) for key, value in run.flat_config().items()}
            parameters = [Param(key, value[:_LONGEST]) for key, value in values.items()]
            for begin in range(0, len(parameters), _AT_ONCE):
                self.client.log_batch(self.id, params=parameters[begin : begin + _AT_ONCE])

    def _new_run(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        return str(self.client.create_run(experiment, run_name=self.run.name).info.run_id)

    def record(self, entry: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        step, now = int(entry["step"]), int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in entry.items() if name != "step"]
        self.client.log_batch(self.id, metrics=metrics)

    def text(self, name: str, text: str, step: int) -> None:
        self.client.log_text(self.id, text, f"{name}-step-{step:08}.txt")

    def picture(self, name: str, picture: Any, step: int) -> None:
        self.client.log_image(self.id, picture, artifact_file=f"{name}-step-{step:08}.png")

    def artifacts(self, paths: Sequence[Path]) -> None:
        for path in paths:
            folder = str(path.relative_to(self.run.folder).parent)
            self.client.log_artifact(self.id, str(path), artifact_path=None if folder == "." else folder)

    def close(self) -> None:
        self.client.set_terminated(self.id)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)
