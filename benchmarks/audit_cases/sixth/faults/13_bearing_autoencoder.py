"""Autoencoder for vibration windows; keeps a snapshot of the best epoch."""
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, 64)
        freq = 3 + 5 * torch.rand(n, 1, generator=g)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        self.x = torch.sin(6.28 * freq * t + phase) + 0.1 * torch.randn(n, 64, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class AutoEncoder(pl.LightningModule):
    def __init__(self, hidden=32, code=6, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, x, batch_idx):
        loss = nn.functional.mse_loss(self(x), x)
        self.log("train/mse", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, x, batch_idx):
        self.log("val/mse", nn.functional.mse_loss(self(x), x), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class BestSnapshot(Callback):
    """Writes best.ckpt every time the validation error gets better."""

    def __init__(self, path="best.ckpt"):
        self.path = path
        self.best = float("inf")

    def on_train_epoch_end(self, trainer, pl_module):
        score = trainer.callback_metrics["val/mse"].item()
        if score >= self.best:
            return
        self.best = score
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path)
            print(f"epoch {trainer.current_epoch}: val/mse {score:.4f}, saved to {self.path}")


def main():
    pl.seed_everything(11)
    train = DataLoader(Windows(1024, 0), batch_size=32, shuffle=True)
    val = DataLoader(Windows(256, 1), batch_size=32)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        callbacks=[BestSnapshot()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(AutoEncoder(), train, val)
    if trainer.is_global_zero:
        print("done")


if __name__ == "__main__":
    main()
