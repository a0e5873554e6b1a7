"""The examples of docs/adapters.md run as they stand, by the names that the page gives."""

import re

import pytest

from lockstep import Trainer
from lockstep.configs import config_file
from tests.processes import ROOT

pytest.importorskip("pytorch_lightning")

PAGE = (ROOT / "docs" / "adapters.md").read_text()
MODULE, IN_PYTHON, TAGS, _, PART = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
QUICK = ["device=cpu", "log.writers=[text_log]", "log.pictures=0", "log.model_summary=false"]


def train(target, *keys):
    trainer = Trainer(config_file.load(target, [*keys, *QUICK]), run_dir=f"runs/{target}", quiet=True)
    return trainer.fit(), trainer.config


def test_the_module_trains_and_its_callback_is_a_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(MODULE)
    (tmp_path / "parts.py").write_text(PART)
    command = re.search(r"lockstep train digits.py:Classifier (.*train.parts.*)", PAGE)[1].replace("'", "").split()
    results, config = train("digits.py:Classifier", *command)
    assert config.batch.global_ == 64
    assert results["eval/val_acc"] > 0.9
    assert results["step"] < 20 * 23  # the Part ended it
    assert results["own/norm"] > 1


def test_the_module_trains_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(MODULE + IN_PYTHON.replace('{"log": {', '{"device": "cpu", "log": {"writers": [], '), names)
    assert names["results"]["eval/val_acc"] > 0.8
    assert names["results"]["step"] == 69


@pytest.mark.exhaustive
def test_the_tags_are_learned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tags.py").write_text(TAGS)
    results, config = train("tags.py:tags", "task.width=64")
    assert (config.batch.global_, config.train.epochs, config.seed) == (32, 4, 42)
    assert results["eval/accuracy"] > 0.7
    assert "a mean over the labels" in (tmp_path / "runs" / "tags.py:tags" / "train.log").read_text()
