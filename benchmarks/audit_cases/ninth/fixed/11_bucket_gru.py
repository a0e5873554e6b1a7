"""Sentiment classification of short token sequences with length-bucketed batches."""
import os
import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

VOCAB = 200


class Reviews(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(5, 40, (1,), generator=g))
            tokens = torch.randint(1, VOCAB, (length,), generator=g)
            label = int((tokens < VOCAB // 2).float().mean() > 0.5)
            self.items.append((tokens, label))
        self.lengths = [len(t) for t, _ in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class LengthBucketBatchSampler(Sampler):
    """Groups samples of similar length so that little padding is needed; each rank takes its share of the batches."""

    def __init__(self, lengths, batch_size, rank, world_size, bucket_size=128, seed=0):
        self.lengths = lengths
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.bucket_size = bucket_size
        self.seed = seed
        self.epoch = 0

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        self.epoch += 1
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        batches = []
        for start in range(0, len(order), self.bucket_size):
            bucket = sorted(order[start:start + self.bucket_size], key=lambda i: self.lengths[i])
            for j in range(0, len(bucket), self.batch_size):
                batches.append(bucket[j:j + self.batch_size])
        rng.shuffle(batches)
        return iter(batches[self.rank:len(self) * self.world_size:self.world_size])

    def __len__(self):
        full, rest = divmod(len(self.lengths), self.bucket_size)
        per_bucket = -(-self.bucket_size // self.batch_size)
        return (full * per_bucket + -(-rest // self.batch_size)) // self.world_size


def collate(items):
    tokens, labels = zip(*items)
    return pad_sequence(tokens, batch_first=True), torch.tensor(labels)


class SentimentGRU(L.LightningModule):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens):
        out, _ = self.gru(self.embed(tokens))
        mask = (tokens > 0).unsqueeze(-1)
        return self.head((out * mask).sum(1) / mask.sum(1))

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens), labels)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(labels))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(7)
    train = Reviews(768, seed=1)
    sampler = LengthBucketBatchSampler(train.lengths, batch_size=16, rank=int(os.environ["RANK"]),
                                       world_size=int(os.environ["WORLD_SIZE"]), seed=7)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
                        use_distributed_sampler=False, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(SentimentGRU(), loader)
    if trainer.is_global_zero:
        print(f"train loss {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    main()
