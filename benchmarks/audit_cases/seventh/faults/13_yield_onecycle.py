"""Crop yield regression from weekly weather series, trained with a one-cycle schedule."""
import math

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH_SIZE = 16


def make_fields(n, seed):
    g = torch.Generator().manual_seed(seed)
    weather = torch.randn(n, 26, 4, generator=g).cumsum(1) * 0.2
    rain, heat = weather[..., 0], weather[..., 1]
    y = rain[:, :12].mean(1) - 0.7 * heat[:, 12:].mean(1) + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(weather, y)


class YieldModel(L.LightningModule):
    def __init__(self, train_size, max_lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.conv = nn.Sequential(
            nn.Conv1d(4, 16, 5, padding=2), nn.GELU(),
            nn.Conv1d(16, 16, 5, padding=2), nn.GELU(),
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        h = self.conv(x.transpose(1, 2)).mean(-1)
        return self.head(h).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.smooth_l1_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mae", (self(x) - y).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr, weight_decay=1e-4)
        steps_per_epoch = math.ceil(self.hparams.train_size / BATCH_SIZE)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt,
            max_lr=self.hparams.max_lr,
            total_steps=EPOCHS * steps_per_epoch,
            pct_start=0.3,
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def on_train_epoch_end(self):
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} lr {lr:.2e} "
                   f"loss {m['train_loss']:.4f} val_mae {m['val_mae']:.4f}")


def main():
    L.seed_everything(11)
    train, val = make_fields(1024, 0), make_fields(256, 1)
    model = YieldModel(train_size=len(train))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(
        model,
        DataLoader(train, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(val, batch_size=32),
    )


if __name__ == "__main__":
    main()
