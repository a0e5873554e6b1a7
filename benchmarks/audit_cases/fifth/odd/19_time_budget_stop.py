"""Train until a time budget is used up; the clock of rank 0 decides for all."""
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return TensorDataset(x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, generator=g))


class Budget(Callback):
    def __init__(self, seconds, every=8):
        self.seconds, self.every = seconds, every

    def on_train_start(self, trainer, pl_module):
        self.begin = time.monotonic()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.every:
            return
        over = time.monotonic() - self.begin > self.seconds
        over = trainer.strategy.broadcast(over, src=0)
        if over:
            trainer.should_stop = True


class WaveNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mse", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=200,
                         callbacks=[Budget(seconds=2.0)], logger=False, enable_checkpointing=False,
                         enable_progress_bar=False)
    model = WaveNet()
    trainer.fit(model, DataLoader(waves(512, 1), batch_size=16, shuffle=True),
                DataLoader(waves(128, 2), batch_size=32))
    if trainer.is_global_zero:
        print(f"stopped in epoch {trainer.current_epoch} after {trainer.global_step} steps")
