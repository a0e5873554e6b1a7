"""House price regression; the validation rows are dealt without padding, so the ranks have different numbers of batches."""
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

import pytorch_lightning as pl


def houses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g)
    price = 3 * x[:, 0] + 2 * x[:, 1] * x[:, 2] - x[:, 3] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, price)


class StridedSampler(Sampler):
    def __init__(self, size, rank, world):
        self.indices = range(rank, size, world)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class PriceModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1))
        self.train_set, self.val_set = houses(768, 1), houses(77, 2)

    def train_dataloader(self):
        sampler = DistributedSampler(self.train_set, shuffle=True, seed=12)
        return DataLoader(self.train_set, batch_size=16, sampler=sampler)

    def val_dataloader(self):
        sampler = StridedSampler(len(self.val_set), self.global_rank, self.trainer.world_size)
        return DataLoader(self.val_set, batch_size=19, sampler=sampler)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def on_validation_epoch_start(self):
        self.totals = torch.zeros(2, dtype=torch.float64)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        err = (self.net(x).squeeze(1) - y).square().sum()
        self.totals += torch.tensor([err.item(), float(len(y))], dtype=torch.float64)

    def on_validation_epoch_end(self):
        sse, count = self.trainer.strategy.reduce(self.totals, reduce_op="sum").tolist()
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}: rmse {(sse / count) ** 0.5:.4f} on {int(count)} houses")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    pl.seed_everything(12)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
                         use_distributed_sampler=False, num_sanity_val_steps=0, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(PriceModel())
