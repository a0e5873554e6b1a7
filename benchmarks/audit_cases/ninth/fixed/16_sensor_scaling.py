"""Fault detection on machine sensor readings, with standardised inputs."""
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SensorData(L.LightningDataModule):
    def __init__(self, root="sensors", batch_size=32):
        super().__init__()
        self.root = Path(root)
        self.batch_size = batch_size

    def prepare_data(self):
        self.root.mkdir(exist_ok=True)
        rng = np.random.default_rng(8)
        offset = np.array([20, -5, 100, 3, 0.5, 60], dtype=np.float32)
        spread = np.array([4, 2, 15, 0.5, 0.1, 9], dtype=np.float32)
        for split, n in (("train", 800), ("val", 200)):
            z = rng.normal(size=(n, 6)).astype(np.float32)
            fault = (z[:, 0] * z[:, 1] + z[:, 2] > 0.4).astype(np.int64)
            np.savez(self.root / f"{split}.npz", x=offset + spread * z, y=fault)

    def setup(self, stage):
        train = np.load(self.root / "train.npz")["x"]
        self.mean = train.mean(axis=0)
        self.std = train.std(axis=0)
        self.splits = {}
        for split in ("train", "val"):
            data = np.load(self.root / f"{split}.npz")
            x = (data["x"] - self.mean) / self.std
            self.splits[split] = TensorDataset(torch.from_numpy(x), torch.from_numpy(data["y"]))

    def train_dataloader(self):
        return DataLoader(self.splits["train"], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.splits["val"], batch_size=self.batch_size)


class FaultDetector(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        acc = (logits.argmax(1) == y).float().mean()
        self.log_dict(
            {"val_loss": F.cross_entropy(logits, y), "val_acc": acc},
            sync_dist=True, batch_size=len(y),
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(FaultDetector(), datamodule=SensorData())
    metrics = trainer.callback_metrics
    trainer.print(f"val loss {metrics['val_loss']:.4f}  val acc {metrics['val_acc']:.3f}")


if __name__ == "__main__":
    main()
