"""Character language model on a directory of text shards that are read as a stream."""
import random
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

CORPUS = Path("corpus")
VOCAB = "abcdefghijklmnopqrstuvwxyz ."
STOI = {c: i for i, c in enumerate(VOCAB)}
CONTEXT = 24


def encode(text):
    return torch.tensor([STOI[c] for c in text])


class ShardStream(IterableDataset):
    def __init__(self, files, rank, world_size, seed=0):
        self.files = list(files)
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.passes = 0

    def __iter__(self):
        files = list(self.files)
        random.Random(self.seed + self.passes).shuffle(files)
        self.passes += 1
        files = files[self.rank::self.world_size]
        info = get_worker_info()
        if info is not None:
            files = files[info.id::info.num_workers]
        for path in files:
            tokens = encode(path.read_text())
            for i in range(0, len(tokens) - CONTEXT, CONTEXT):
                chunk = tokens[i:i + CONTEXT + 1]
                yield chunk[:-1], chunk[1:]


class TextData(L.LightningDataModule):
    def prepare_data(self):
        CORPUS.mkdir(exist_ok=True)
        rng = random.Random(7)
        words = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "town"]
        for k in range(9):
            text = ""
            while len(text) < 1537:
                text += " ".join(rng.choices(words, k=6)) + ". "
            (CORPUS / f"shard_{k:02d}.txt").write_text(text[:1537])

    def setup(self, stage):
        files = sorted(CORPUS.glob("shard_*.txt"))
        self.train = ShardStream(files[:-1], self.trainer.global_rank, self.trainer.world_size)
        held_out = encode(files[-1].read_text())
        x = held_out[:-1].view(-1, CONTEXT)
        y = held_out[1:].view(-1, CONTEXT)
        self.val = TensorDataset(x, y)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16)


class CharLM(L.LightningModule):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB), dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(VOCAB))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.out(h)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(CharLM(), datamodule=TextData())
    if trainer.is_global_zero:
        print("steps", trainer.global_step, "val loss", round(trainer.callback_metrics["val_loss"].item(), 4))
