"""A LightningModule and a DataModule for tests: labels that are missing unevenly, a scheduler, metrics, float64."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def data(length, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    labels = (inputs[:, :3] + 0.5 * torch.randn(length, 3, generator=generator, dtype=torch.float64)).argmax(1)
    return inputs, labels


class Data(pl.LightningDataModule):
    """70 samples in batches of 12: the last batch of an epoch has ten."""

    def __init__(self, missing=False, batch_size=12):
        super().__init__()
        self.missing, self.batch_size = missing, batch_size

    def setup(self, stage):
        self.sets = [data(70, 0), data(29, 1)]
        if self.missing:
            for place, (_, labels) in enumerate(self.sets):
                labels[torch.rand(len(labels), generator=torch.Generator().manual_seed(place)) < 0.4] = -100

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.sets[0]), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.sets[1]), batch_size=7)


class Net(pl.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
        self.accuracy = MulticlassAccuracy(3, average="macro", ignore_index=-100)

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("progress", self.global_step + 100 * self.current_epoch)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self(inputs)
        self.accuracy(outputs, labels)
        self.log_dict({"val_loss": cross_entropy(outputs, labels), "val_acc": self.accuracy}, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [scheduler]
