"""Digit-like patterns with an exponential moving average of the weights, used for validation and export."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


def patterns(n, seed):
    protos = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(protos[y] + 1.5 * torch.randn(n, 64, generator=g), y)


class EMA(Callback):
    def __init__(self, decay=0.95, path="ema.pt"):
        self.decay, self.path = decay, path
        self.shadow, self.backup = None, None

    def on_train_start(self, trainer, pl_module):
        self.shadow = [p.detach().clone() for p in pl_module.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for s, p in zip(self.shadow, pl_module.parameters()):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer, pl_module):
        if self.shadow is None:
            return
        self.backup = [p.detach().clone() for p in pl_module.parameters()]
        for s, p in zip(self.shadow, pl_module.parameters()):
            p.copy_(s)

    @torch.no_grad()
    def on_validation_end(self, trainer, pl_module):
        if self.backup is None:
            return
        for b, p in zip(self.backup, pl_module.parameters()):
            p.copy_(b)
        self.backup = None

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            names = [n for n, _ in pl_module.named_parameters()]
            torch.save(dict(zip(names, self.shadow)), self.path)


class PatternNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, label_smoothing=0.1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("ema_acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


if __name__ == "__main__":
    pl.seed_everything(9)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
                         num_sanity_val_steps=0, callbacks=[EMA()], logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(PatternNet(), DataLoader(patterns(1024, 1), batch_size=32, shuffle=True),
                DataLoader(patterns(256, 2), batch_size=64))
    if trainer.is_global_zero:
        print("ema_acc", float(trainer.callback_metrics["ema_acc"]))
