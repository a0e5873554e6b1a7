"""Bag-of-words sentiment model, data parallel on several processes."""
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GOOD = "great lovely superb warm funny brilliant charming fresh moving clever".split()
BAD = "dull awful boring cold clumsy stale weak noisy tedious flat".split()
NEUTRAL = "the film plot actor scene camera ending music story screen role director".split()


def make_reviews(n, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        label = rng.randint(0, 1)
        words = rng.choices(GOOD if label else BAD, k=3) + rng.choices(NEUTRAL, k=6)
        rng.shuffle(words)
        out.append((" ".join(words), label))
    return out


def build_vocab(reviews):
    words = set()
    for text, _ in reviews:
        words.update(text.split())
    vocab = {"<pad>": 0}
    for w in sorted(words):
        vocab[w] = len(vocab)
    return vocab


class Reviews(Dataset):
    def __init__(self, reviews, vocab, max_len=9):
        self.reviews, self.vocab, self.max_len = reviews, vocab, max_len

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, i):
        text, label = self.reviews[i]
        ids = [self.vocab[w] for w in text.split()][: self.max_len]
        ids += [0] * (self.max_len - len(ids))
        return torch.tensor(ids), torch.tensor(label)


class BagModel(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab_size, 24)
        self.out = nn.Linear(24, 2)

    def forward(self, ids):
        return self.out(self.emb(ids))


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    reviews = make_reviews(480, seed=3)
    vocab = build_vocab(reviews)
    data = Reviews(reviews, vocab)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=11)
    loader = DataLoader(data, batch_size=24, sampler=sampler)

    torch.manual_seed(5)
    model = DistributedDataParallel(BagModel(len(vocab)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for ids, label in loader:
            loss = nn.functional.cross_entropy(model(ids), label)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"[{epoch}] vocab={len(vocab)} last loss on rank 0: {loss.item():.4f}")

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "vocab": vocab}, "bow.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
