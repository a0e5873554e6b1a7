"""Streaming sensor rows from one CSV; rows are dealt to the ranks in turn, an odd remainder is dropped."""
import csv
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lightning.pytorch as pl

ROWS = 1003


class SensorRows(IterableDataset):
    def __init__(self, path, window=64):
        self.path, self.window = path, window
        self.epoch = 0

    def rows(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        usable = ROWS // world * world
        start = self.epoch % (ROWS - usable + 1)
        with open(self.path, newline="") as f:
            for i, row in enumerate(csv.reader(f)):
                if start <= i < start + usable and (i - start) % world == rank:
                    values = torch.tensor([float(v) for v in row])
                    yield values[:-1], values[-1]

    def __iter__(self):
        rng = random.Random(31 * self.epoch + dist.get_rank())
        buffer = []
        for item in self.rows():
            if len(buffer) < self.window:
                buffer.append(item)
                continue
            k = rng.randrange(self.window)
            yield buffer[k]
            buffer[k] = item
        rng.shuffle(buffer)
        yield from buffer
        self.epoch += 1


class SensorModel(pl.LightningModule):
    def __init__(self, path="sensor.csv"):
        super().__init__()
        self.path = Path(path)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1))

    def prepare_data(self):
        rng = random.Random(5)
        with open(self.path, "w", newline="") as f:
            writer = csv.writer(f)
            for _ in range(ROWS):
                x = [rng.gauss(0, 1) for _ in range(6)]
                y = x[0] * x[1] + 0.5 * x[2] - x[5] + rng.gauss(0, 0.1)
                writer.writerow([f"{v:.5f}" for v in x + [y]])

    def train_dataloader(self):
        return DataLoader(SensorRows(self.path), batch_size=16)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.smooth_l1_loss(self.net(x).squeeze(1), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(SensorModel())
    if trainer.is_global_zero:
        print("loss", float(trainer.callback_metrics["train_loss"]), "steps", trainer.global_step)
