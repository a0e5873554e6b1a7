"""Wafer map defect classifier; reports detected and missed defects on the held-out lot."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix

import pytorch_lightning as pl
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler

CLASSES = ["none", "edge", "scratch"]


def wafer_maps(n, seed):
    g = torch.Generator().manual_seed(seed)
    maps = 0.3 * torch.randn(n, 1, 12, 12, generator=g)
    labels = torch.randint(0, 3, (n,), generator=g)
    for i, c in enumerate(labels.tolist()):
        if c == 1:
            maps[i, 0, :2] += 1.0
        elif c == 2:
            col = int(torch.randint(3, 9, (1,), generator=g))
            maps[i, 0, 3:10, col] += 1.0
    return TensorDataset(maps, labels)


class WaferData(pl.LightningDataModule):
    def setup(self, stage=None):
        self.train = wafer_maps(384, 1)
        self.val = wafer_maps(64, 2)
        self.test = wafer_maps(45, 3)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)

    def test_dataloader(self):
        sampler = UnrepeatedDistributedSampler(self.test, shuffle=False)
        return DataLoader(self.test, batch_size=8, sampler=sampler)


class WaferNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 6 * 6, len(CLASSES)),
        )
        self.confusion = MulticlassConfusionMatrix(num_classes=len(CLASSES))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.confusion.update(self(x).argmax(1), y)

    def on_test_epoch_end(self):
        cm = self.confusion.compute()
        self.confusion.reset()
        defects = cm[1:].sum()
        found = cm[1:, 1:].sum()
        self.rows = [f"{name}: {cm[i, i].item()} of {cm[i].sum().item()} correct"
                     for i, name in enumerate(CLASSES)]
        self.log("wafers", cm.sum().float(), sync_dist=True)
        self.log("recall", found.float() / defects, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    pl.seed_everything(4)
    data = WaferData()
    model = WaferNet()
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print("\n".join(model.rows))
