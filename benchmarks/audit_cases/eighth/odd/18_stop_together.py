"""Early stopping and a time budget, both decided for all processes at once; validation shards of unequal size."""
import time

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class StopTogether(L.Callback):
    def __init__(self, patience=2, min_delta=1e-3, budget_s=30.0):
        self.patience, self.min_delta, self.budget_s = patience, min_delta, budget_s
        self.best, self.bad_epochs = float("inf"), 0

    def on_fit_start(self, trainer, module):
        self.started = time.monotonic()

    def on_validation_epoch_end(self, trainer, module):
        totals = module.val_totals.clone()
        module.val_totals.zero_()
        if trainer.sanity_checking:
            return
        dist.all_reduce(totals)
        loss = (totals[0] / totals[1]).item()
        if loss < self.best - self.min_delta:
            self.best, self.bad_epochs = loss, 0
        else:
            self.bad_epochs += 1
        late = trainer.strategy.broadcast(time.monotonic() - self.started > self.budget_s, src=0)
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: val loss {loss:.4f} over {int(totals[1])} samples")
        if late or self.bad_epochs >= self.patience:
            trainer.should_stop = True


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 1))
        self.val_totals = torch.zeros(2, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_totals[0] += nn.functional.mse_loss(self.net(x), y, reduction="sum")
        self.val_totals[1] += len(y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(3)
        x = torch.randn(715, 8, generator=g)
        y = x[:, :1] * x[:, 1:2] + x[:, 2:3].sin() + 0.3 * torch.randn(715, 1, generator=g)
        self.train_set, self.val_set = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])

    def train_dataloader(self):
        t = self.trainer
        sampler = DistributedSampler(self.train_set, t.world_size, t.global_rank, shuffle=True, seed=1)
        return DataLoader(self.train_set, batch_size=16, sampler=sampler)

    def val_dataloader(self):
        mine = range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size)
        return DataLoader(Subset(self.val_set, mine), batch_size=17)


def main():
    L.seed_everything(16)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=12, use_distributed_sampler=False,
        callbacks=[StopTogether()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), datamodule=Data())


if __name__ == "__main__":
    main()
