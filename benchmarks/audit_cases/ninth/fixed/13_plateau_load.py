"""Short-term electricity load forecasting with an MLP over lagged values."""
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LAGS = 24


def load_curve(hours, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours).float()
    daily = torch.sin(2 * torch.pi * t / 24)
    weekly = 0.5 * torch.sin(2 * torch.pi * t / 168)
    return daily + weekly + 0.3 * torch.randn(hours, generator=g)


def windows(series):
    x = series.unfold(0, LAGS + 1, 1)
    return TensorDataset(x[:, :LAGS].clone(), x[:, LAGS:].clone())


class LoadForecaster(L.LightningModule):
    def __init__(self, hidden=64, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(LAGS, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.loss = nn.SmoothL1Loss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self(x)
        self.log("val_loss", self.loss(pred, y), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": sched, "monitor": "val_loss"},
        }

    def on_train_end(self):
        lr = self.optimizers().param_groups[0]["lr"]
        print(f"finished, learning rate now {lr:.2e}")


def main():
    L.seed_everything(3)
    series = load_curve(1400, seed=5)
    train = DataLoader(windows(series[:1100]), batch_size=32, shuffle=True)
    val = DataLoader(windows(series[1100:]), batch_size=64)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = LoadForecaster()
    trainer.fit(model, train, val)


if __name__ == "__main__":
    main()
