"""Rare species recognition: balanced draws with replacement, every rank draws with its own generator."""
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassRecall

import pytorch_lightning as pl

N_SPECIES = 5


def sightings(n, seed):
    g = torch.Generator().manual_seed(seed)
    freq = torch.tensor([0.6, 0.25, 0.1, 0.03, 0.02])
    y = torch.multinomial(freq, n, replacement=True, generator=g)
    centers = torch.randn(N_SPECIES, 10, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centers[y] + 0.8 * torch.randn(n, 10, generator=g), y)


class Sightings(pl.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train, self.val = sightings(1280, 1), sightings(512, 2)

    def train_dataloader(self):
        labels = self.train.tensors[1]
        weights = 1.0 / labels.bincount(minlength=N_SPECIES).clamp(min=1)[labels]
        generator = torch.Generator().manual_seed(1000 + self.trainer.global_rank)
        sampler = WeightedRandomSampler(weights, len(self.train) // self.trainer.world_size,
                                        replacement=True, generator=generator)
        return DataLoader(self.train, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64, sampler=DistributedSampler(self.val, shuffle=False))


class SpeciesNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, N_SPECIES))
        self.recall = MulticlassRecall(num_classes=N_SPECIES, average="macro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.recall.update(self.net(x), y)
        self.log("val_macro_recall", self.recall, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    pl.seed_everything(6)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
                         use_distributed_sampler=False, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False)
    trainer.fit(SpeciesNet(), datamodule=Sightings())
    if trainer.is_global_zero:
        print("macro recall", float(trainer.callback_metrics["val_macro_recall"]))
