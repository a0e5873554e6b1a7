"""Learn addition with a GRU; the training set grows from short to long numbers each epoch."""
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning.pytorch as pl

DIGITS = 4


def encode(pairs):
    rows, targets = [], []
    for a, b in pairs:
        da, db = [[(v // 10 ** i) % 10 for i in range(DIGITS)] for v in (a, b)]
        rows.append([x * 10 + y for x, y in zip(da, db)] + [0])
        targets.append([((a + b) // 10 ** i) % 10 for i in range(DIGITS + 1)])
    return TensorDataset(torch.tensor(rows), torch.tensor(targets))


def problems(n, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        top = 10 ** rng.randint(1, DIGITS)
        out.append((rng.randrange(top), rng.randrange(top)))
    return out


class Curriculum(pl.LightningDataModule):
    def __init__(self, shares=(0.25, 0.5, 1.0)):
        super().__init__()
        self.shares = shares

    def setup(self, stage=None):
        self.train = encode(sorted(problems(2048, 1), key=sum))
        self.val = encode(problems(256, 2))

    def train_dataloader(self):
        share = self.shares[min(self.trainer.current_epoch, len(self.shares) - 1)]
        easy = range(int(share * len(self.train)))
        return DataLoader(Subset(self.train, easy), batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)


class Adder(pl.LightningModule):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(100, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 10)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("digit_acc", (self(x).argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=4e-3)


if __name__ == "__main__":
    pl.seed_everything(33)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=4,
                         reload_dataloaders_every_n_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Adder(), datamodule=Curriculum())
    if trainer.is_global_zero:
        print("steps", trainer.global_step, "digit_acc", float(trainer.callback_metrics["digit_acc"]))
