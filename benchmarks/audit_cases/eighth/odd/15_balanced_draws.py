"""Rare-event detection: every process draws its own balanced sample, with replacement, from all of the data."""
import pytorch_lightning as pl
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import BinaryAveragePrecision


class BalancedDraws(Sampler):
    def __init__(self, labels, draws, seed):
        counts = torch.bincount(labels)
        self.weights = 1.0 / counts[labels].double()
        self.draws = draws
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.draws

    def __iter__(self):
        picks = torch.multinomial(self.weights, self.draws, replacement=True, generator=self.generator)
        return iter(picks.tolist())


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.06).long()
    x = torch.randn(n, 10, generator=g)
    x[y == 1, :4] += 1.3
    return TensorDataset(x, y)


class EventData(pl.LightningDataModule):
    def setup(self, stage):
        self.train_set = events(2000, 1)
        self.val_set = events(512, 2)

    def train_dataloader(self):
        world, rank = self.trainer.world_size, self.trainer.global_rank
        labels = self.train_set.tensors[1]
        sampler = BalancedDraws(labels, draws=1024 // world, seed=100 + rank)
        return DataLoader(self.train_set, batch_size=32, sampler=sampler)

    def val_dataloader(self):
        sampler = DistributedSampler(
            self.val_set, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(self.val_set, batch_size=64, sampler=sampler)


class Detector(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.val_ap = BinaryAveragePrecision()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self(x), y.float())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_ap.update(self(x).sigmoid(), y)
        self.log("val_ap", self.val_ap)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def main():
    pl.seed_everything(12)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Detector(), datamodule=EventData())
    if trainer.is_global_zero:
        print("val ap", round(trainer.callback_metrics["val_ap"].item(), 4))


if __name__ == "__main__":
    main()
