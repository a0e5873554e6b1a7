"""A task in a file of the user, whose data are in another file; and runs of it."""

from lockstep import Trainer
from lockstep_lab.bundle import make
from tests import runs

TASK = """
import warnings

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep import Task
from mine_layers import Noisy

warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")


class Texts(Dataset):
    def __init__(self, path):
        self.path, self.rows = path, torch.load(path)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"values": self.rows[index], "name": f"row {index}"}


class Mine(Task):
    def __init__(self, train, path_of_data=None):
        self.data = Texts(train)
        self.scale = torch.tensor(0.5)
        self.words = lambda text: text.split()
        self.copy = torch.zeros(5_000_000)

    def train_data(self):
        return self.data

    def model(self):
        self.built = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Noisy(), nn.Linear(8, 1))
        return self.built

    def collate(self, samples):
        values = torch.stack([one["values"] for one in samples])
        sizes = torch.nested.nested_tensor([values[0, :2], values[-1, :3]])
        return {"values": values, "names": [one["name"] for one in samples], "sizes": [(sizes, "both")]}

    def loss(self, model, batch):
        assert batch["names"][0].startswith("row ") and batch["sizes"][0][0].is_nested
        inputs, targets = batch["values"][:, :6], batch["values"][:, 6:]
        return {"loss": (self.scale * (model(inputs) - targets).square()).sum()}
"""
LAYERS = """
from torch import nn


class Noisy(nn.Dropout):
    pass
"""
SETTINGS = {
    "train": {"steps": 6},
    "batch": {"global": 12, "micro": 3},
    "checkpoint": {"every_steps": 3, "keep_last": 5},
    "log": {"every_steps": 1},
}


def settings_of(folder, **sections):
    """The config of a training of the task in `folder`, where its files are written."""
    import torch

    folder.mkdir(exist_ok=True)
    (folder / "mine_layers.py").write_text(LAYERS)
    (folder / "mine.py").write_text(TASK)
    torch.save(torch.randn(60, 7, generator=torch.Generator().manual_seed(0)), folder / "data.pt")
    task = {"kind": f"{folder}/mine.py:Mine"}
    return runs.config(**(SETTINGS | {"task": task, "data": {"train": f"{folder}/data.pt"}} | sections))


def fit(settings, run_dir):
    """A training on this rank."""
    Trainer(settings, run_dir=run_dir, quiet=True).fit()


def bundle(settings, run_dir, step, out):
    """The bundle of a step, on these ranks."""
    config, _ = make.settled(Trainer(settings).config)
    return make.make(config, run_dir, step, out, tell=lambda text: None)
