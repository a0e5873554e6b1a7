"""Short-term electricity load forecasting with a GRU (synthetic hourly series)."""
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import lightning.pytorch as pl


class LoadWindows(Dataset):
    def __init__(self, series, starts, history=24, horizon=4):
        self.series, self.starts = series, starts
        self.history, self.horizon = history, horizon

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        s = self.starts[i]
        x = self.series[s:s + self.history].unsqueeze(-1)
        y = self.series[s + self.history:s + self.history + self.horizon]
        return x, y


class LoadData(pl.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(3)
        t = torch.arange(1200, dtype=torch.float32)
        self.series = (torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(2 * math.pi * t / 168)
                       + 0.1 * torch.randn(1200, generator=g))
        self.train = LoadWindows(self.series, list(range(0, 768)))
        self.val = LoadWindows(self.series, list(range(900, 1028)))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)


class Forecaster(pl.LightningModule):
    def __init__(self, lr=5e-3, warmup=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.huber_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mae", (self(x) - y).abs().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps_per_epoch = len(self.trainer.datamodule.train_dataloader())
        total = steps_per_epoch * self.trainer.max_epochs
        warm = max(1, int(self.hparams.warmup * total))

        def factor(step):
            if step < warm:
                return (step + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (total - warm))))

        return {"optimizer": opt,
                "lr_scheduler": {"scheduler": LambdaLR(opt, factor), "interval": "step"}}


if __name__ == "__main__":
    pl.seed_everything(11)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
                         logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Forecaster(), datamodule=LoadData())
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
