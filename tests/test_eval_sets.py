"""Several sets of evaluation data by name, and the evaluation of a run on other data."""

import json
import re

import pytest
import torch

from lockstep import LockstepError, Trainer
from lockstep.cli import application as cli
from lockstep.core import evaluation_progress, evaluation_run
from lockstep.parts import evaluations_file
from tests import own_tasks, runs
from tests.ranks import run_ranks

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, MetricCollection
import lockstep

class Lines(lockstep.Task):
    def __init__(self, eval: str = "0"):
        self.shift = float(eval)
    def model(self):
        return nn.Linear(1, 1)
    def train_data(self):
        return TensorDataset(torch.linspace(-1, 1, 48)[:, None])
    def eval_data(self):
        return TensorDataset(torch.linspace(-1, 1, 7 + int(self.shift))[:, None] + self.shift)
    def loss(self, model, batch):
        return (model(batch[0]) - batch[0]).square().sum()
    def predict(self, model, batch):
        return batch[0]
    def metrics(self):
        update = lambda metrics, output, batch: metrics["mean"].update(output)
        return lockstep.Metrics(MetricCollection({"mean": MeanMetric()}), update)
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "lines.py").write_text(TASK)
    return runs.config(
        task={"kind": f"{tmp_path / 'lines.py'}:Lines"},
        data={"eval": {"near": "0", "far": "5"}},
        train={"steps": 4, "eval_every_steps": 2},
        checkpoint={"keep_best": "min eval/far/loss"},
    )


def fit(settings, folder):
    return Trainer(settings, run_dir=folder, quiet=True).fit()


@pytest.mark.parametrize("world", [1, 2])
def test_each_set_is_evaluated_and_its_results_have_its_name(tmp_path, config, world):
    results = run_ranks(world, fit, config, str(tmp_path / "run"))[0]
    assert {"eval/near/loss", "eval/far/loss", "eval/near/samples", "eval/far/samples"} <= results.keys()
    assert (results["eval/near/samples"], results["eval/far/samples"]) == (7, 12)
    assert results["eval/far/mean"] == pytest.approx(5.0)
    assert results["eval/near/mean"] == pytest.approx(0.0, abs=1e-6)
    again = Trainer(config, run_dir=tmp_path / "run", quiet=True).evaluate()
    assert {f"eval/{name}": value for name, value in again.items()} == pytest.approx(
        {name: value for name, value in results.items() if name.startswith("eval/")}
    )


def test_a_run_is_evaluated_on_other_data(tmp_path, config, monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.setenv("COLUMNS", "200")
    fit(config, tmp_path / "run")
    done = CliRunner().invoke(cli.app, ["evaluate", str(tmp_path / "run"), "data.eval='3'", "batch.micro=2"])
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["eval/samples"] == 10
    assert results["eval/mean"] == pytest.approx(3.0)
    some = CliRunner().invoke(cli.app, ["evaluate", str(tmp_path / "run"), "data.eval='3'", "data.eval_limit=4"])
    assert some.exit_code == 0, some.stderr
    assert "note: evaluated on 4 of 10 samples, evenly spread (data.eval_limit)" in some.stderr
    few = json.loads(some.stdout)
    assert (few["eval/samples"], few["eval/of_samples"]) == (4, 10)
    ends = torch.linspace(-1, 1, 10)[[0, 2, 5, 7]] + 3
    assert few["eval/mean"] == pytest.approx(float(ends.mean()))
    kept = evaluations_file.read(tmp_path / "run")
    assert [(entry["step"], entry["changes"]) for entry in kept] == [
        (4, ["data.eval='3'", "batch.micro=2"]),
        (4, ["data.eval='3'", "data.eval_limit=4"]),
    ]
    assert all(kept[-1][name] == value for name, value in few.items())
    done = CliRunner().invoke(cli.app, ["evaluate", str(tmp_path / "run"), "optim.lr=3"])
    assert done.exit_code == 2
    assert "optim.lr belongs to the training of this run" in done.stderr
    assert "only these keys can be changed: data.eval," in done.stderr


def test_a_training_says_on_which_samples_it_is_evaluated_how_far_it_is_and_what_memory_that_took(
    tmp_path, config, monkeypatch
):
    monkeypatch.setattr(evaluation_progress, "_EVERY_S", 0.0)
    config["data"]["eval_limit"], config["batch"]["micro"] = 5, 2
    fit(config, tmp_path / "run")
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("note: evaluated on 5 of 12 samples of far, evenly spread (data.eval_limit)") == 1
    for samples in (2, 4):
        assert log.count(f"evaluating near: {samples} of 5 samples after ") == 2
    assert len(re.findall(r"  MB before [\d.]+ after [\d.]+ peak \+[\d.]+\n", log)) == 2
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [entry for entry in entries if "eval/far/loss" in entry]
    assert [(entry["eval/far/samples"], entry["eval/far/of_samples"]) for entry in evaluated] == [(5, 12)] * 2


def test_a_set_that_cannot_be_opened_is_an_error_before_any_is_evaluated(tmp_path, config, monkeypatch):
    fit(config, tmp_path / "run")
    config["data"]["eval"] = {"near": "0", "far": "-8"}
    began = []
    monkeypatch.setattr(evaluation_run, "evaluate", lambda *_, **__: began.append(1) or {})
    trainer = Trainer(config, run_dir=tmp_path / "run", quiet=True)
    with pytest.raises(RuntimeError, match="must be non-negative"):
        trainer.evaluate()
    assert not began


def test_a_run_that_was_moved_away_from_its_data_says_how_to_name_them(tmp_path, config, monkeypatch):
    """The paths in its config are relative."""
    opened = """        if not Path(self.path).exists():
            raise DataError("no such file", where=self.path, remedy="copy it")
"""
    source = TASK.replace("self.shift = float(eval)", "self.path, self.shift = eval, 0")
    source = source.replace("def eval_data(self):\n", f"def eval_data(self):\n{opened}")
    imports = "from pathlib import Path\nfrom lockstep.core.errors import DataError\n"
    (tmp_path / "lines.py").write_text(imports + source)
    settings = config | {"data": {"eval": {"near": "here.csv", "far": "here.csv"}}, "checkpoint": {}}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.csv").touch()
    fit(settings, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for evaluated, key in ((settings["data"]["eval"], "data.eval.near"), ("here.csv", "data.eval")):
        trainer = Trainer(settings | {"data": {"eval": evaluated}}, run_dir=tmp_path / "run", quiet=True)
        with pytest.raises(LockstepError, match="no such file") as caught:
            trainer.evaluate()
        remedy = f"copy it; or give the place of the data with {key}=PATH: 'here.csv' is neither a file nor a folder"
        assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("evaluated", "text"),
    [({}, "names no evaluation data"), ({"a/b": "0"}, "'a/b' cannot name evaluation data"), ({"a": 3}, "data.eval")],
)
def test_wrong_names_are_errors(tmp_path, config, evaluated, text):
    with pytest.raises(LockstepError, match=text):
        fit(config | {"data": {"eval": evaluated}}, tmp_path / "run")


def test_a_result_without_the_name_of_its_set_is_an_error_before_the_first_step(tmp_path, config):
    with pytest.raises(LockstepError, match=r"there is no metric eval/loss(?s:.*)eval/near/loss"):
        fit(config | {"checkpoint": {"keep_best": "min eval/loss"}}, tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


def test_where_nothing_is_evaluated_the_log_names_the_key(tmp_path, config):
    fit(config | {"train": {"steps": 2}, "checkpoint": {}}, tmp_path / "run")
    assert "nothing is evaluated; train.eval_every_epochs=1" in (tmp_path / "run/train.log").read_text()


class BrokenEvaluation(own_tasks.FromFiles):
    def eval_data(self):
        return own_tasks.Files(40, broken=[3, 39])


def fit_broken(folder):
    settings = runs.config(data={"on_error": "skip"}, train={"steps": 2, "eval_every_steps": 2})
    return Trainer(settings, run_dir=folder, quiet=True).fit(BrokenEvaluation())


@pytest.mark.parametrize("world", [1, 2])
def test_samples_of_an_evaluation_that_cannot_be_read_are_named(tmp_path, world, capfd):
    assert run_ranks(world, fit_broken, str(tmp_path))[0]["eval/bad"] == 2
    lines = (tmp_path / "train.log").read_text().splitlines()
    named = [line.partition("evaluation, left out: ")[2] for line in lines if "left out" in line]
    assert [line.partition(": OSError: truncated file")[0] for line in named] == [
        f"folder/{index:03}.png: sample {index} cannot be read" for index in (3, 39)
    ]
    settings = runs.config(data={"on_error": "skip"}, train={"steps": 2, "eval_every_steps": 2})
    capfd.readouterr()
    assert Trainer(settings, run_dir=tmp_path).evaluate(BrokenEvaluation())["bad"] == 2
    assert "evaluation, left out: folder/003.png" in capfd.readouterr().err
