"""`benchmarks/same_results.py` notices what differs between two source trees."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
import torch

from tests import runs
from tests.own_tasks import Plain
from tests.processes import HANG_S, ROOT, environment

CASES = "toy/plain/2,heads/part/1,crossed/toy/1-to-2"


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("same_results")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in [name for name in sys.modules if name.startswith("same_results")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (0.1 + 0.2, 0.3),
        (1, 1.0),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (None, float("nan")),
    ],
)
def test_each_difference_is_found_with_its_place(tool, one, other):
    assert tool.first_difference({"x": [7, one]}, {"x": [7, other]}, "log").startswith("log.x[1]: ")


def test_equal_values_are_the_same_also_where_they_are_no_numbers(tool):
    values = {"a": torch.tensor([float("nan")]), "b": [float("nan"), None, "text"], "c": torch.tensor(2)}
    assert tool.first_difference(values, {name: values[name] for name in values}, "log") is None


def test_other_weights_are_named_and_other_times_are_no_difference(tool, tmp_path):
    settings = runs.config(train={"steps": 3, "eval_every_steps": 0}, log={"every_steps": 1})
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        runs.fit(Plain(), settings | {"seed": seed}, tmp_path / name / "run")
        torch.save({}, tmp_path / name / "outcome.pt")
    for file in ("config.yaml", "metrics.jsonl"):  # which show another seed sooner than the checkpoint
        shutil.copy(tmp_path / "one/run" / file, tmp_path / "other/run" / file)
    assert tool.difference(tmp_path / "one", tmp_path / "again", messages=True) is None
    found = tool.difference(tmp_path / "one", tmp_path / "other", messages=False)
    assert found.startswith("step-00000003.model.")
    assert "differs by up to" in found
    log = tmp_path / "again/run/metrics.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    entries[1]["train/loss"] += 1e-12
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    found = tool.difference(tmp_path / "one", tmp_path / "again", messages=False)
    assert found.startswith("metrics.jsonl[1].train/loss: ")


def test_there_are_at_least_as_many_cases_as_the_first_comparison_had(tool, tmp_path):
    assert len(tool.all_cases(tmp_path)) >= 163


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 3])
def test_two_trees_are_the_same_until_the_code_of_one_changes(seed, tmp_path):
    tree = tmp_path / "tree"
    for folder in ("src", "packages/recipes/src"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    toy = tree / "packages/recipes/src/lockstep_recipes/tasks/toy/task.py"
    text = toy.read_text()
    assert text.count("seed=1)") == 1  # of the training data
    toy.write_text(text.replace("seed=1)", f"seed={seed})"))
    command = [sys.executable, ROOT / "benchmarks/same_results.py", ROOT, tree, "--cases", CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment())
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    if seed == 1:
        assert rows == dict.fromkeys(CASES.split(","), "same") | {"3": "cases: 3 same, 0 different, 0 failed"}, done
    else:
        assert rows["3"] == "cases: 1 same, 2 different, 0 failed", done
        assert rows["heads/part/1"] == "same"
        assert rows["toy/plain/2"].startswith("metrics.jsonl[0].train/loss: ")
    assert done.returncode == (seed != 1)
