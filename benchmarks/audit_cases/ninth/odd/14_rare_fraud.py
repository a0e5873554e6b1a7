"""Fraud detection on imbalanced data: rows are drawn with replacement, each rank draws its own."""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset
from torchmetrics.classification import BinaryAUROC


def make_payments(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.04).long()
    x = torch.randn(n, 10, generator=g)
    x[:, :3] += 1.2 * y[:, None]
    return TensorDataset(x, y)


class BalancedDraws(Sampler):
    """Independent draws with replacement, weighted by class; the ranks differ by their seeds."""

    def __init__(self, labels, draws, rank, seed=0):
        share = torch.bincount(labels).double() / len(labels)
        self.weights = 1.0 / share[labels]
        self.draws = draws
        self.rank = rank
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 7919 * self.epoch + 104729 * self.rank)
        return iter(torch.multinomial(self.weights, self.draws, replacement=True, generator=g).tolist())

    def __len__(self):
        return self.draws


class Payments(L.LightningDataModule):
    def setup(self, stage):
        self.train_set = make_payments(4000, 0)
        self.val_set = make_payments(1000, 1)

    def train_dataloader(self):
        draws = len(self.train_set) // self.trainer.world_size
        sampler = BalancedDraws(self.train_set.tensors[1], draws, self.trainer.global_rank, seed=3)
        return DataLoader(self.train_set, batch_size=50, sampler=sampler)

    def val_dataloader(self):
        sampler = DistributedSampler(
            self.val_set, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(self.val_set, batch_size=100, sampler=sampler)


class FraudNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.auroc = BinaryAUROC()

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y.float())
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.auroc.update(self(x), y)
        self.log("val_auroc", self.auroc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main():
    L.seed_everything(8)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, use_distributed_sampler=False,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(FraudNet(), datamodule=Payments())
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"train loss {metrics['train_loss']:.4f}  val auroc {metrics['val_auroc']:.3f}")


if __name__ == "__main__":
    main()
