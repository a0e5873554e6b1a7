"""Toy transliteration with a transformer encoder; batches are built from sequences of similar length."""
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lightning.pytorch as pl

VOCAB = 30


class Words(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.src = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(4, 20))] for _ in range(n)]
        self.tgt = [[(7 * a + (b > 15)) % (VOCAB - 1) + 1 for a, b in zip(s, s[1:] + s[:1])] for s in self.src]

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return torch.tensor(self.src[i]), torch.tensor(self.tgt[i])


def collate(items):
    src, tgt = zip(*items)
    return pad_sequence(src, batch_first=True), pad_sequence(tgt, batch_first=True)


class BucketBatchSampler:
    def __init__(self, lengths, batch_size, rank, world_size, seed=0):
        self.rank, self.world_size = rank, world_size
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.epoch = 0

    def _batches(self):
        rng = random.Random(self.seed + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], rng.random()))
        batches = [order[i:i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        return batches

    def __iter__(self):
        batches = self._batches()
        batches = batches[self.rank::self.world_size][:len(self)]
        self.epoch += 1
        return iter(batches)

    def __len__(self):
        return (len(self.lengths) + self.batch_size - 1) // self.batch_size // self.world_size


class Transliterator(pl.LightningModule):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)
        self.train_set, self.val_set = Words(768, 1), Words(128, 2)

    def loss(self, batch):
        src, tgt = batch
        h = self.emb(src)
        h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)
        h = self.enc(h, src_key_padding_mask=src.eq(0))
        per_token = nn.functional.cross_entropy(self.out(h).transpose(1, 2), tgt,
                                                ignore_index=0, reduction="none")
        return (per_token.sum(1) / tgt.ne(0).sum(1)).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def train_dataloader(self):
        lengths = [len(s) for s in self.train_set.src]
        sampler = BucketBatchSampler(lengths, 16, self.global_rank, self.trainer.world_size)
        return DataLoader(self.train_set, batch_sampler=sampler, collate_fn=collate)

    def val_dataloader(self):
        sampler = DistributedSampler(self.val_set, shuffle=False)
        return DataLoader(self.val_set, batch_size=32, sampler=sampler, collate_fn=collate)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
                         use_distributed_sampler=False, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False)
    trainer.fit(Transliterator())
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, val loss {float(trainer.callback_metrics['val_loss']):.4f}")
