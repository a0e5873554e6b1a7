"""The example of docs/inference.md runs as it stands."""

import re

import torch

from lockstep import Trainer
from lockstep.configs import config_file
from tests.processes import ROOT


def test_own_inference_gives_what_the_trainer_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/inference.md").read_text(), re.DOTALL)
    short = ["train.epochs=null", "train.steps=2", "train.eval_every_epochs=null"]
    Trainer(config_file.load("digits", short), run_dir="runs/digits", quiet=True).fit()
    names: dict = {}
    exec(code, names)
    assert names["results"]["samples"] == 360
    assert not names["model"].training
    expected = names["trainer"].predict()[:8]
    assert torch.allclose(names["outputs"], torch.stack([torch.as_tensor(output) for output in expected]))
