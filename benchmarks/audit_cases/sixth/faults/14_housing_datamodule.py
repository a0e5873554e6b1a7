"""House price regression with a LightningDataModule on a csv file."""
import csv
import os

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

N_FEATURES = 10


class Housing(pl.LightningDataModule):
    def __init__(self, path="housing.csv", batch_size=32, val_size=200):
        super().__init__()
        self.path = path
        self.batch_size = batch_size
        self.val_size = val_size

    def prepare_data(self):
        if os.path.exists(self.path):
            return
        g = torch.Generator().manual_seed(0)
        x = torch.randn(1000, N_FEATURES, generator=g)
        w = torch.randn(N_FEATURES, generator=g)
        price = x @ w + 0.5 * (x[:, 0] * x[:, 1]) + torch.randn(1000, generator=g)
        with open(self.path, "w", newline="") as f:
            writer = csv.writer(f)
            for row, p in zip(x.tolist(), price.tolist()):
                writer.writerow([f"{v:.5f}" for v in row + [p]])

    def setup(self, stage=None):
        with open(self.path) as f:
            table = torch.tensor([[float(v) for v in row] for row in csv.reader(f)])
        full = TensorDataset(table[:, :-1], table[:, -1])
        self.train_set, self.val_set = random_split(full, [len(full) - self.val_size, self.val_size])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=50)


class Regressor(pl.LightningModule):
    def __init__(self, width=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(N_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_mse", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mse", F.mse_loss(self(x), y), sync_dist=True)

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: train {m['train_mse']:.3f} val {m['val_mse']:.3f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=6,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regressor(), datamodule=Housing())


if __name__ == "__main__":
    main()
