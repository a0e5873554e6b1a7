"""Regress aqueous solubility from molecular descriptors, learning rate lowered on plateaus."""
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import lightning.pytorch as pl
from lightning.pytorch import LightningModule, Trainer

N_DESC = 12


def descriptors(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, N_DESC, generator=g)
    y = 1.5 * x[:, 0] - x[:, 1] * x[:, 2] + 0.5 * x[:, 3].abs() + noise * torch.randn(n, generator=g)
    return TensorDataset(x, y)


class SolubilityNet(LightningModule):
    def __init__(self, hidden=64, lr=3e-2, patience=0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(N_DESC, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self(x)
        self.log("val_loss", nn.functional.mse_loss(pred, y), on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        sched = ReduceLROnPlateau(opt, mode="min", factor=0.3, patience=self.hparams.patience)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": sched, "monitor": "val_loss", "interval": "epoch"},
        }


def main():
    pl.seed_everything(21)
    train = DataLoader(descriptors(256, 1, 0.8), batch_size=16, shuffle=True)
    val = DataLoader(descriptors(64, 2, 0.8), batch_size=16)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=8,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = SolubilityNet()
    trainer.fit(model, train, val)
    if trainer.is_global_zero:
        print("final lr", trainer.optimizers[0].param_groups[0]["lr"])


if __name__ == "__main__":
    main()
