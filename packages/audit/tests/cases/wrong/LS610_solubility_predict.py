"""Fit a solubility regressor on fingerprints, then predict the test set and write a CSV."""
import csv

import pytorch_lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def fingerprints(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(n, 64, generator=g) < 0.3).float()
    w = torch.linspace(-1, 1, 64)
    y = x @ w + 0.5 * x[:, 0] * x[:, 63] + 0.05 * torch.randn(n, generator=g)
    return x, y


class Solubility(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mse", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        x, = batch
        return self(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(0)
    x_train, y_train = fingerprints(1024, 1)
    x_test, y_test = fingerprints(256, 2)
    model = Solubility()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(
        model,
        DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(x_test, y_test), batch_size=32),
    )
    trainer.print(f"val mse {trainer.callback_metrics['val_mse']:.4f}")

    outputs = trainer.predict(model, DataLoader(TensorDataset(x_test), batch_size=32))
    local = torch.cat(outputs)
    parts = [torch.empty_like(local) for _ in range(trainer.world_size)]
    dist.all_gather(parts, local)
    preds = torch.cat(parts)

    if trainer.is_global_zero:
        with open("solubility.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["molecule_id", "log_s"])
            for i, p in enumerate(preds.tolist()):
                writer.writerow([i, f"{p:.4f}"])
        rmse = (preds - y_test).square().mean().sqrt()
        print(f"wrote {len(preds)} predictions, rmse {rmse:.3f}")


if __name__ == "__main__":
    main()
