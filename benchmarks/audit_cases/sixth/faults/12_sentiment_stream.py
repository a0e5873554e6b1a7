"""Bag-of-embeddings sentiment classifier, streamed from jsonl shards."""
import json
import random
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

DATA = Path("reviews")
VOCAB = 200
MAX_LEN = 16


def write_shards(n_shards=4, per_shard=256):
    rng = random.Random(0)
    DATA.mkdir(exist_ok=True)
    for s in range(n_shards + 1):
        name = "valid.jsonl" if s == n_shards else f"train-{s:02d}.jsonl"
        with open(DATA / name, "w") as f:
            for _ in range(per_shard):
                label = rng.randint(0, 1)
                lo, hi = (0, 120) if label == 0 else (80, VOCAB)
                f.write(json.dumps({"ids": [rng.randrange(lo, hi) for _ in range(MAX_LEN)], "label": label}) + "\n")


class ReviewStream(IterableDataset):
    def __init__(self, files, buffer=128):
        self.files = list(files)
        self.buffer = buffer
        self.epoch = 0

    def read(self):
        for path in self.files:
            with open(path) as f:
                for line in f:
                    row = json.loads(line)
                    yield torch.tensor(row["ids"]), torch.tensor(row["label"])

    def __iter__(self):
        rng = random.Random(self.epoch)
        self.epoch += 1
        pool = []
        for item in self.read():
            pool.append(item)
            if len(pool) >= self.buffer:
                yield pool.pop(rng.randrange(len(pool)))
        rng.shuffle(pool)
        yield from pool


class Reviews(pl.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        write_shards()

    def train_dataloader(self):
        return DataLoader(ReviewStream(sorted(DATA.glob("train-*.jsonl"))), batch_size=self.batch_size)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(VOCAB, 32, mode="mean")
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, _):
        ids, y = batch
        logits = self.head(self.emb(ids))
        loss = F.cross_entropy(logits, y)
        acc = (logits.argmax(1) == y).float().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("acc", acc, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} loss {m['loss']:.4f} acc {m['acc']:.3f} steps {self.global_step}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    pl.seed_everything(3)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Classifier(), datamodule=Reviews())
