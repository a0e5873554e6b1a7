"""Short-term electricity load forecasting; the learning rate drops when validation stalls."""
import lightning as L
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset


class LoadWindows(Dataset):
    """Sliding windows over an hourly load curve."""

    def __init__(self, hours, seed, context=48):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours + context + 1, dtype=torch.float32)
        daily = torch.sin(2 * torch.pi * t / 24)
        weekly = 0.4 * torch.sin(2 * torch.pi * t / 168)
        self.series = daily + weekly + 0.35 * torch.randn(len(t), generator=g)
        self.context = context
        self.hours = hours

    def __len__(self):
        return self.hours

    def __getitem__(self, i):
        return self.series[i:i + self.context], self.series[i + self.context]


class Forecaster(L.LightningModule):
    def __init__(self, hidden=32, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        _, h = self.rnn(x.unsqueeze(-1))
        return self.out(h[-1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        plateau = ReduceLROnPlateau(opt, mode="min", factor=0.3, patience=0, threshold=0.02)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
        }

    def on_train_epoch_end(self):
        val = self.trainer.callback_metrics["val_loss"]
        self.print(f"epoch {self.current_epoch}  val_loss {val:.4f}")


def main():
    L.seed_everything(2024)
    train = DataLoader(LoadWindows(768, seed=0), batch_size=32, shuffle=True)
    val = DataLoader(LoadWindows(96, seed=1), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=6,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Forecaster(), train, val)


if __name__ == "__main__":
    main()
