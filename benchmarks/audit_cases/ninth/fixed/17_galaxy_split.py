"""Galaxy shape classification with a train/validation split made in the data module."""
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def simulate_galaxies(n=640, size=20):
    g = torch.Generator().manual_seed(2024)
    axis = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    labels = torch.randint(0, 3, (n,), generator=g)
    angle = torch.rand(n, generator=g) * torch.pi
    ratio = torch.tensor([1.0, 0.6, 0.3])[labels]
    u = xx * torch.cos(angle)[:, None, None] + yy * torch.sin(angle)[:, None, None]
    v = -xx * torch.sin(angle)[:, None, None] + yy * torch.cos(angle)[:, None, None]
    image = torch.exp(-4 * (u ** 2 + (v / ratio[:, None, None]) ** 2))
    image = image + 0.25 * torch.randn(n, size, size, generator=g)
    return TensorDataset(image.unsqueeze(1), labels)


class GalaxyData(pl.LightningDataModule):
    def __init__(self, batch_size=32, val_fraction=0.25):
        super().__init__()
        self.batch_size = batch_size
        self.val_fraction = val_fraction

    def setup(self, stage=None):
        full = simulate_galaxies()
        n_val = int(len(full) * self.val_fraction)
        self.train_set, self.val_set = random_split(
            full, [len(full) - n_val, n_val], generator=torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class GalaxyNet(pl.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * width, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x):
        return self.classifier(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            acc = self.trainer.callback_metrics.get("val_acc")
            if acc is not None:
                self.print(f"epoch {self.current_epoch}: val acc {acc:.3f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main():
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(GalaxyNet(), datamodule=GalaxyData())
    trainer.print(f"final val loss {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
