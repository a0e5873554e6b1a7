"""A training that takes its time, so that something can happen to it."""

import re

from safetensors.torch import load_file

from tests.processes import lockstep

TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Task

class Slow(Task):
    def model(self):
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 5))

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(256, 10, generator=generator), torch.randn(256, 5, generator=generator))

    def loss(self, model, batch):
        time.sleep(0.1)
        return (model(batch[0]) - batch[1]).square().sum()
"""
STEPS = 250
TRAINING = (
    "task.py:Slow",
    f"train.steps={STEPS}",
    "batch.global=32",
    "log.writers=[text_log,json_lines]",
    "log.every_steps=10",
)


def logged_step(run):
    """The last step that a run has logged."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return max([0, *map(int, re.findall(r'"step": ?(\d+)', text))])


def export(run, out):
    """The bytes of each weight of a run, exported into a new folder."""
    done = lockstep("export", run, out)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.safetensors")
    return {name: weight.numpy().tobytes() for name, weight in load_file(path).items()}
