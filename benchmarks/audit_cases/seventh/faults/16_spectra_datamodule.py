"""Classify mineral spectra. Data handling lives in a LightningDataModule."""
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

N_CLASSES = 6


class SpectraDataModule(L.LightningDataModule):
    def __init__(self, root="spectra", batch_size=32):
        super().__init__()
        self.path = Path(root) / "spectra.pt"
        self.batch_size = batch_size

    def prepare_data(self):
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        g = torch.Generator().manual_seed(3)
        templates = torch.rand(N_CLASSES, 128, generator=g)
        y = torch.randint(0, N_CLASSES, (1200,), generator=g)
        x = templates[y] + 0.8 * torch.randn(1200, 128, generator=g)
        torch.save({"x": x, "y": y}, self.path)

    def setup(self, stage):
        blob = torch.load(self.path)
        full = TensorDataset(blob["x"], blob["y"])
        self.train_set, self.val_set = random_split(full, [1000, 200])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class SpectraNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, N_CLASSES),
        )
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(N_CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_acc(self.net(x), y)
        self.log("val_acc", self.val_acc)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.print(f"epoch {self.current_epoch} val_acc {self.val_acc.compute():.3f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SpectraNet(), datamodule=SpectraDataModule())
