"""The example of docs/language_models.md runs as it stands, and its text writes what it has learned."""

import re

import pytest
import yaml

from lockstep.configs import config_file
from lockstep_recipes.tasks.lora.options import LoraOptions
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "language_models.md").read_text()


@pytest.mark.exhaustive
def test_the_example_learns_its_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["results"]["eval/perplexity"] < 3
    assert names["model"].config.model_type == "llama"
    assert len(names["tokenizer"].decode(names["ids"][0])) > 30
    assert "the " in capsys.readouterr().out


def test_the_page_has_the_defaults_of_the_recipe():
    config = config_file.load("lm", [])
    assert config.batch.global_ == 32
    assert config.task["length"] == 256
    assert (config.optim.lr, config.optim.weight_decay, config.optim.clip_norm) == (2e-3, 0.1, 1.0)
    assert (config.train.epochs, config.train.min_steps) == (3, 1000)
    assert (config.schedule.name, config.schedule.warmup_share, config.schedule.end_factor) == ("cosine", 0.05, 0.1)
    tuned = config_file.load("lm", ["task.model=somewhere"])
    assert (tuned.optim.lr, tuned.optim.weight_decay, tuned.train.epochs) == (2e-5, 0.01, 3)
    adapted = config_file.load("lm", ["task.model=somewhere", "task.lora.rank=16"])
    assert (adapted.optim.lr, adapted.optim.weight_decay, adapted.train.epochs) == (2e-4, 0.01, 3)
    for row in (
        "| `task.model=NAME` | 2e-5, 0.01 | 3 epochs |",
        "| `task.model=NAME` with `task.lora` | 2e-4, 0.01 | 3 epochs |",
        "| new | 2e-3, 0.1 | 3 epochs, at least 1,000 steps |",
    ):
        assert row in PAGE


def test_the_page_has_the_options_of_adapters():
    rows = re.findall(r"^\| (`.*?) \|", PAGE.partition("## LoRA")[2].partition("## What comes out")[0], re.MULTILINE)
    told = dict(re.findall(r"(\w+)(?:: ([\w.]+))?", " ".join(rows).replace("`dora`", "dora: false")))
    defaults = {name: field.default for name, field in LoraOptions.model_fields.items()}
    assert {name: yaml.safe_load(told[name]) for name in defaults} == defaults
    assert "32 rows of 256 tokens" in PAGE
