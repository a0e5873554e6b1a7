import pytorch_lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class DemandData(L.LightningDataModule):
    def setup(self, stage=None):
        def series(n, seed, noise):
            g = torch.Generator().manual_seed(seed)
            phase = torch.rand(n, 1, generator=g) * 6.28
            t = torch.arange(25).float() / 4
            y = torch.sin(t + phase) + noise * torch.randn(n, 25, generator=g)
            return TensorDataset(y[:, :24], y[:, 24])

        self.train_set = series(192, 0, 0.1)
        self.val_set = series(24, 1, 0.3)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=12, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=12)


class Forecaster(L.LightningModule):
    def __init__(self, lr=0.004):
        super().__init__()
        self.save_hyperparameters()
        self.gru = nn.GRU(1, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        _, h = self.gru(x.unsqueeze(-1))
        return self.head(h[-1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss, on_epoch=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0, threshold=0.03)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def on_train_epoch_end(self):
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        val = self.trainer.callback_metrics.get("val_loss", torch.tensor(float("nan")))
        print(f"rank {self.global_rank} epoch {self.current_epoch} lr {lr:.5f} val {val.item():.4f}", flush=True)


def main():
    L.seed_everything(17)
    trainer = L.Trainer(
        max_epochs=8, devices=2, strategy="ddp", accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    model = Forecaster()
    trainer.fit(model, datamodule=DemandData())
    norm = sum(p.detach().pow(2).sum() for p in model.parameters()).sqrt()
    print(f"rank {trainer.global_rank} final norm {norm.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
