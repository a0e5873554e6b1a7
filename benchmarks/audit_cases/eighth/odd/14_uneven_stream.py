"""Click prediction on a stream of log files of different sizes; every process owns some of the files."""
import random
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

LOGS = Path("logs")
WEIGHTS = [0.9, -1.1, 0.5, 0.0, 1.4, -0.6]


def make_row(rng):
    x = [rng.gauss(0, 1) for _ in WEIGHTS]
    y = int(sum(a * b for a, b in zip(WEIGHTS, x)) + rng.gauss(0, 0.5) > 0)
    return x, y


class LogStream(IterableDataset):
    """Yields the same number of rows in every process; other rows are left out in every pass."""

    def __init__(self, files, rank, batch_size):
        self.files = files
        self.rank = rank
        self.passes = 0
        self.rows = sum(1 for f in files for _ in f.open())
        batches = torch.tensor(self.rows // batch_size)
        dist.all_reduce(batches, op=dist.ReduceOp.MIN)
        self.quota = int(batches) * batch_size

    def __iter__(self):
        rng = random.Random(f"{self.rank}/{self.passes}")
        self.passes += 1
        files = list(self.files)
        rng.shuffle(files)
        skip = set(rng.sample(range(self.rows), self.rows - self.quota))
        lines = (line for f in files for line in f.open())
        for k, line in enumerate(lines):
            if k in skip:
                continue
            *x, y = line.split()
            yield torch.tensor([float(v) for v in x]), torch.tensor(float(y))


class Clicks(L.LightningDataModule):
    batch_size = 16

    def prepare_data(self):
        LOGS.mkdir(exist_ok=True)
        rng = random.Random(0)
        for k, size in enumerate([210, 95, 160, 130, 75, 190]):
            rows = (make_row(rng) for _ in range(size))
            text = "".join(" ".join(f"{v:.4f}" for v in x) + f" {y}\n" for x, y in rows)
            (LOGS / f"day_{k}.txt").write_text(text)

    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        mine = sorted(LOGS.glob("day_*.txt"))[rank::world]
        return DataLoader(LogStream(mine, rank, self.batch_size), batch_size=self.batch_size)

    def val_dataloader(self):
        rng = random.Random(1)
        rows = [make_row(rng) for _ in range(128)]
        data = TensorDataset(torch.tensor([x for x, _ in rows]), torch.tensor([float(y) for _, y in rows]))
        return DataLoader(data, batch_size=32)


class Logistic(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(1), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", ((self.net(x).squeeze(1) > 0) == (y > 0.5)).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(9)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Logistic(), datamodule=Clicks())
    if trainer.is_global_zero:
        print("steps", trainer.global_step, "val acc", round(trainer.callback_metrics["val_acc"].item(), 4))
