"""Short-term load forecasting with a small temporal convolution net and a one-cycle schedule."""
import math

import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW, HORIZON = 48, 12


def make_series(n=1400):
    g = torch.Generator().manual_seed(5)
    t = torch.arange(n, dtype=torch.float32)
    daily = torch.sin(2 * math.pi * t / 24)
    weekly = 0.5 * torch.sin(2 * math.pi * t / 168)
    return daily + weekly + 0.1 * torch.randn(n, generator=g)


class LoadData(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        frames = make_series().unfold(0, WINDOW + HORIZON, 1)
        x, y = frames[:, :WINDOW], frames[:, WINDOW:]
        self.train_set = TensorDataset(x[:1024], y[:1024])
        self.val_set = TensorDataset(x[1084:1340], y[1084:1340])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=64)


class TCN(L.LightningModule):
    def __init__(self, channels=32, max_lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        layers, width = [], 1
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(width, channels, 3, padding=dilation, dilation=dilation), nn.GELU()]
            width = channels
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(channels, HORIZON)

    def forward(self, x):
        return self.head(self.body(x.unsqueeze(1)).mean(-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.smooth_l1_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mae", (self(x) - y).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr, weight_decay=1e-2)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.max_lr, pct_start=0.2,
            total_steps=self.trainer.estimated_stepping_batches,
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(11)
    model = TCN()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, datamodule=LoadData())
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    if trainer.is_global_zero:
        print(f"final lr {lr:.2e}  val mae {trainer.callback_metrics['val_mae']:.4f}")


if __name__ == "__main__":
    main()
