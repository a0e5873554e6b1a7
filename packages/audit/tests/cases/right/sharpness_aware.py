"""Sharpness-aware minimisation: each rank climbs along its own local gradient, then all descend together."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pytorch_lightning as pl


def noisy_blobs(n, seed):
    centers = 1.2 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = centers[y] + torch.randn(n, 8, generator=g)
    flip = torch.rand(n, generator=g) < 0.1
    y = torch.where(flip, torch.randint(0, 4, (n,), generator=g), y)
    return TensorDataset(x, y)


class SamClassifier(pl.LightningModule):
    def __init__(self, rho=0.05, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        params = list(self.net.parameters())

        local = torch.autograd.grad(self.loss(batch), params)
        norm = torch.sqrt(sum(g.square().sum() for g in local)) + 1e-12
        kept = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, local):
                p.add_(g, alpha=float(self.hparams.rho / norm))

        opt.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, k in zip(params, kept):
                p.copy_(k)
        opt.step()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


if __name__ == "__main__":
    pl.seed_everything(15)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(SamClassifier(), DataLoader(noisy_blobs(1024, 1), batch_size=32, shuffle=True),
                DataLoader(noisy_blobs(256, 2), batch_size=64))
    if trainer.is_global_zero:
        print("val_acc", float(trainer.callback_metrics["val_acc"]))
