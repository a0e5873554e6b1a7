"""The example and the commands of docs/optimizers.md."""

import json
import runpy
from pathlib import Path

import pytest

from lockstep import Trainer
from tests import runs
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "lion_task.py"
MUON = [
    {"name": "rest", "match": ["*embeddings*", "*classifier*", "*pooler*"]},
    {"name": "matrices", "match": ["*"], "ndim": 2, "optimizer": "Muon", "lr": 0.02},
]


def fit(settings, folder=None):
    return runs.fit(runpy.run_path(str(EXAMPLE))["Digits"](), settings, folder)


@pytest.mark.exhaustive
def test_the_example_learns_the_digits(tmp_path):
    settings = runs.config(batch={"global": 32}, train={"epochs": 5, "steps": None, "eval_every_epochs": 1}, optim={})
    settings["optim"] = {}
    _, results = fit(settings, tmp_path / "run")
    assert results["eval/loss"] < 0.4
    rates = [json.loads(line).get("train/lr") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [rate for rate in rates if rate]
    assert max(rates) < 3e-3  # the task's rate times the task's schedule
    assert rates[-1] < max(rates)


def test_the_example_trains_the_same_weights_on_two_ranks():
    settings = runs.config(batch={"global": 32}, train={"steps": 10}) | {"optim": {}}
    one, two = fit(settings)[0], run_ranks(2, fit, settings)[0][0]
    assert runs.difference(one, two) < 1e-3  # float32, and signs


@pytest.mark.exhaustive
def test_muon_and_adamw_learn_the_docstrings(tmp_path):
    settings = Trainer("docstrings", quiet=True).config.model_dump(by_alias=True)
    settings["optim"]["groups"] = MUON
    settings["train"] |= {"steps": 100, "epochs": None, "eval_every_epochs": None, "eval_every_steps": 100}
    settings["schedule"] |= {"name": "constant", "warmup_steps": 0}  # the recipe's are for a thousand steps
    settings["log"] |= {"writers": [], "pictures": 0}
    results = Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    assert results["eval/accuracy"] > 0.5
