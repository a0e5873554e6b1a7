"""Modules and data for tests of what a LightningModule may ask for, and of what it logs."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from packages.recipes.tests.adapters import lightning_cases as cases


class LogsMetrics(cases.Net):
    """Its steps log different metrics under one name. The rate is logged as the optimizer has it."""

    def __init__(self):
        super().__init__()
        self.seen = nn.ModuleDict({"acc": MulticlassAccuracy(3, average="micro")})

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.seen["acc"](outputs, batch[1])
        self.log("val_acc", self.seen["acc"])
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return cross_entropy(outputs, batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class AtOnce(Dataset):
    """Samples that are read several at once, and not by index."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitems__(self, indices):
        return [tuple(tensor[index] for tensor in self.tensors) for index in indices]


class AsksForDevices(pl.LightningDataModule):
    """Divides its batch by the devices, in each method, as data modules of Lightning do."""

    def prepare_data(self):
        self.printing = self.trainer.is_global_zero

    def setup(self, stage):
        self.sets = [cases.data(70, 0), cases.data(29, 1)]
        self.size = 12 // self.trainer.world_size

    def train_dataloader(self):
        assert self.trainer.num_devices * self.trainer.num_nodes == 12 // self.size
        return DataLoader(AtOnce(self.sets[0]), batch_size=self.size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(AtOnce(self.sets[1]), batch_size=7)
