"""Trainings on the device in Python: what they do on a GPU, as far as this shows without one."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.distributed import world
from lockstep.trainer import Trainer
from tests.python_device import NAME
from tests.ranks import run_on_python_device


class Lines(lockstep.Task):
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))

    def train_data(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def eval_data(self):
        return self.train_data()

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum")


def train(device, folder, changes):
    """Train on the device. Returns its reads by the host, and the names of its operations."""
    world.pick_device = lambda *_, **__: torch.device(NAME, 0)
    sections = {"batch": {"global": 16, "micro": 8}, "train": {"steps": 4}, "log": {"every_steps": 4, "writers": []}}
    config = {"name": "lines", "data": {"workers": 0}, **sections, **changes}
    Trainer(lockstep.config.RunConfig(**config), run_dir=folder).fit(Lines())
    return device.reads(), [one.name for one in device.log]


def test_the_host_reads_the_device_where_it_logs_or_saves_and_nowhere_else(tmp_path):
    changes = {"optim": {"lr": 0.1, "clip_norm": 1.0}, "train": {"steps": 4, "ema_decay": 0.9}}
    reads, operations = run_on_python_device(train, str(tmp_path / "run"), changes)
    files = {where.split(":")[0] for _, where in reads}
    assert files <= {"checkpoint/finite.py", "engine/dry_run.py", "engine/log_window.py", "checkpoint/saver.py"}
    assert any("addmm" in name for name in operations)
