"""TensorBoard, W&B (offline), MLflow (SQLite) and Trackio (local) get the log of a run, and a run that goes on stays
the same there. `make test-trackers` installs the libraries."""

import dataclasses
import importlib.util
import json
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest

from lockstep import Trainer
from lockstep.core.presenter import Presenter
from lockstep.parts.writers.tensorboard import TensorBoard
from tests import own_tasks, runs
from tests.parts.cases import run_info


def needs(library):
    is_there = importlib.util.find_spec(library) is not None
    return pytest.mark.skipif(not is_there, reason=f"{library} is not installed; see make test-trackers")


class Shown(Presenter):
    def report(self, values, samples):
        return "a report"

    def pictures(self, values):
        return {"curve": np.full((8, 8, 3), 7, dtype=np.uint8)}


class Reporting(own_tasks.Classes):
    presenter = Shown


def train_twice(tmp_path, tracker):
    """Train 10 steps, and go on to 20. The id of the run in the tracker, which is the same, if it has ids."""
    ids = set()
    for steps in (10, 20):
        settings = runs.config(
            name="tried",
            train={"steps": steps, "eval_every_steps": 5},
            schedule={"name": "constant"},
            log={"writers": ["text_log", tracker], "pictures": 8, "tags": ["quick"], "artifacts": True},
        )
        Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit(Reporting())
        kept = tmp_path / "run" / "trackers" / f"{tracker}.json"
        ids.add(json.loads(kept.read_text())["id"] if kept.exists() else None)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "cannot be" not in log
    assert "step 20/20" in log
    (its_id,) = ids
    return its_id


@pytest.mark.exhaustive  # importing the libraries takes 10 s
@needs("mlflow")
def test_mlflow_has_the_log_in_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    its_id = train_twice(tmp_path, "mlflow")
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        (found,) = store.execute("select run_uuid, name, status, artifact_uri from runs").fetchall()
        assert found[:3] == (its_id, "tried", "FINISHED")
        losses = store.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        assert [step for step, _ in losses] == [5, 10, 15, 20]
        assert losses[-1][1] < losses[0][1]
        parameters = dict(store.execute("select key, value from params").fetchall())
        assert (parameters["optim.lr"], parameters["batch.global"], parameters["train.steps"]) == ("0.01", "24", "10")
        tags = dict(store.execute("select key, value from tags").fetchall())
        assert tags["quick"] == "true"
        assert tags["run_dir"] == str(tmp_path / "run")
    store.close()
    files = Path(found[3].removeprefix("file://"))
    assert (files / "eval" / "report-step-00000015.txt").read_text() == "a report"
    assert {"curve-step-00000020.png", "confusion-step-00000020.png"} <= {p.name for p in (files / "eval").iterdir()}
    assert (files / "config.yaml").exists()
    assert (files / "checkpoints" / "step-00000020").is_dir()


def records_of(path):
    """The records of a file of W&B: a header of 7 bytes, then blocks of LevelDB's log format."""
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        rest = 32768 - place % 32768
        if rest < 7:
            place += rest
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of a record
            yield record
            record = b""


@pytest.mark.exhaustive  # importing the libraries takes 10 s
@needs("wandb")
def test_wandb_has_the_log_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    its_id = train_twice(tmp_path, "wandb")
    from wandb.proto import wandb_internal_pb2

    seen = {"step": [], "config": {}, "tags": set(), "artifacts": [], "runs": set(), "keys": set()}
    for path in sorted((tmp_path / "run" / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
        for data in records_of(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                seen["runs"].add((record.run.run_id, record.run.display_name))
                seen["tags"] |= set(record.run.tags)
                seen["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                seen["keys"] |= values.keys()
                if "train/loss" in values:
                    seen["step"].append(int(values["_step"]))
            if record.HasField("request") or record.HasField("artifact"):
                seen["artifacts"].append(record.artifact.name or record.request.WhichOneof("request_type"))
    assert seen["runs"] == {(its_id, "tried")}
    assert seen["tags"] == {"quick"}
    assert seen["step"] == [5, 10, 15, 20]
    assert seen["config"]["optim"]["lr"] == 0.01
    assert len(seen["config"]["git_commit"]) >= 40
    assert {"eval/accuracy", "eval/report", "eval/curve", "eval/confusion"} <= {
        "/".join(key.split("/")[:2]) for key in seen["keys"]
    }
    assert f"run-{its_id}" in seen["artifacts"]


@pytest.mark.exhaustive  # importing the libraries takes 10 s
@needs("trackio")
def test_trackio_has_the_log_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    its_id = train_twice(tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "lockstep.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
        (config,) = store.execute("select config from configs").fetchall()
    store.close()
    assert {name for name, _, _ in rows} == {its_id}
    assert its_id.startswith("tried-")
    metrics = [(step, json.loads(values)) for _, step, values in rows]
    assert [step for step, values in metrics if "train/loss" in values] == [5, 10, 15, 20]
    assert {"eval/accuracy", "eval/report", "eval/curve", "eval/confusion"} <= {
        key for _, one in metrics for key in one
    }
    assert json.loads(config[0])["optim"]["lr"] == 0.01
    assert json.loads(config[0])["tags"] == ["quick"]
    assert list((tmp_path / "trackio").rglob("step-00000020*")) or list((tmp_path / "trackio").rglob("*artifact*"))


def test_tensorboard_has_hyperparameters_and_reports(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    values = {"optim.lr": 0.01, "optim.name": "AdamW", "data.drop_last": True, "task.sizes": [1, 2], "data.fold": None}
    for first in (0, 5):
        run = dataclasses.replace(run_info(tmp_path, first), hyperparameters=values)
        writer = TensorBoard(run)
        writer.record({"step": first + 5, "train/loss": 1.0})
        writer.text("eval/report", "a report\nof two lines", first + 5)
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()} == {
        "optim.lr": 0.01,
        "optim.name": "AdamW",
        "data.drop_last": True,
        "task.sizes": "[1, 2]",
    }
    reports = events.Tensors("eval/report")
    assert [(event.step, event.tensor_proto.string_val[0]) for event in reports] == [
        (step, b"    a report\n    of two lines") for step in (5, 10)
    ]


SOURCE = """
from lockstep.core.writer import Writer

class Notes(Writer):
    def __init__(self, run):
        super().__init__(run)
        self.file = (run.folder / "notes.txt").open("a")
        print(run.hyperparameters["optim.lr"], run.flat_config()["optim.name"], run.tags(), run.git, file=self.file)

    def text(self, name, text, step):
        print(name, text, step, file=self.file)

    def artifacts(self, paths):
        print(*(path.relative_to(self.run.folder) for path in paths), file=self.file)

    def close(self):
        self.file.close()
"""


def test_writer_gets_reports_and_files_and_what_the_run_is(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    settings = runs.config(
        train={"steps": 2, "eval_every_steps": 1},
        log={"writers": [f"{tmp_path}/mine.py:Notes"], "tags": ["quick"], "artifacts": True, "model_summary": False},
    )
    Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit(Reporting())
    git = json.loads((tmp_path / "run" / "environment.json").read_text())["git"]
    assert (tmp_path / "run" / "notes.txt").read_text().splitlines() == [
        f"0.01 AdamW ['quick'] {git}",
        "eval/report a report 1",
        "eval/report a report 2",
        "config.yaml environment.json source checkpoints/step-00000002",
    ]
