"""1d CNN on synthetic ecg beats, records of several patients."""
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def beats(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(-1, 1, 80)
    y = torch.randint(0, 3, (n,), generator=g)
    width = 0.05 + 0.05 * y.float().unsqueeze(1)
    shift = 0.2 * torch.randn(n, 1, generator=g)
    x = torch.exp(-((t - shift) / width) ** 2) + 0.4 * torch.randn(n, 80, generator=g)
    flip = torch.rand(n, generator=g) < 0.2
    y = torch.where(flip, torch.randint(0, 3, (n,), generator=g), y)
    return TensorDataset(x.unsqueeze(1), y)


class BeatNet(pl.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, 8, 7, stride=2), nn.ReLU(),
            nn.Conv1d(8, 16, 5, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 3),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val_loss"}}

    def on_train_epoch_start(self):
        lr = self.optimizers().param_groups[0]["lr"]
        print(f"[{self.global_rank}] epoch {self.current_epoch} lr {lr:.5f}")


if __name__ == "__main__":
    pl.seed_everything(5)
    train = DataLoader(beats(768, 0), batch_size=32, shuffle=True)
    val = DataLoader(beats(96, 1), batch_size=16)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=8, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(BeatNet(), train, val)
