"""Predict the failure of pumps from tabular sensor readings."""
import os

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PumpData(pl.LightningDataModule):
    def __init__(self, path="pumps.npz", batch_size=32):
        super().__init__()
        self.path = path
        self.batch_size = batch_size
        self.mean = 0.0
        self.std = 1.0

    def prepare_data(self):
        if not os.path.exists(self.path):
            rng = np.random.default_rng(3)
            scale = np.array([1.0, 30.0, 0.1, 200.0, 5.0, 12.0])
            offset = np.array([0.0, 80.0, 1.2, 900.0, -4.0, 35.0])
            z = rng.normal(size=(1280, 6))
            y = (z @ np.array([1.0, -0.7, 0.4, 0.9, -1.2, 0.3]) + 0.3 * rng.normal(size=1280) > 0)
            np.savez(self.path, x=(z * scale + offset).astype("float32"), y=y.astype("int64"))
        x = torch.from_numpy(np.load(self.path)["x"])[:1024]
        self.mean = x.mean(0)
        self.std = x.std(0)

    def setup(self, stage):
        raw = np.load(self.path)
        x, y = torch.from_numpy(raw["x"]), torch.from_numpy(raw["y"])
        x = (x - self.mean) / self.std
        self.train_set = TensorDataset(x[:1024], y[:1024])
        self.val_set = TensorDataset(x[1024:], y[1024:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class FailureNet(pl.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        acc = (self(x).argmax(1) == y).float().mean()
        self.log("val_acc", acc, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(FailureNet(), datamodule=PumpData())
    if trainer.is_global_zero:
        print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
