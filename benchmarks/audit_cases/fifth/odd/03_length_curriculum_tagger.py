"""Sequence tagger: short sentences first, batches of similar length, loss per token of the global batch."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD = -100


class Sentences(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(n):
            ids = [rng.randrange(1, 40) for _ in range(rng.randint(3, 24))]
            tags = [(a + b) % 4 for a, b in zip(ids, [0] + ids[:-1])]
            self.items.append((ids, tags))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        ids, tags = self.items[i]
        return torch.tensor(ids), torch.tensor(tags)


class CurriculumBatches:
    """All ranks build the same list of batches, and each takes every world-th of them."""

    def __init__(self, lengths, size, limits, rank, world, seed=0):
        self.lengths, self.size, self.limits = lengths, size, limits
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def _mine(self):
        limit = self.limits[min(self.epoch, len(self.limits) - 1)]
        rng = random.Random(self.seed * 1009 + self.epoch)
        pool = [i for i, n in enumerate(self.lengths) if n <= limit]
        rng.shuffle(pool)
        pool.sort(key=lambda i: self.lengths[i])
        batches = [pool[k:k + self.size] for k in range(0, len(pool), self.size)]
        rng.shuffle(batches)
        batches = batches[: len(batches) // self.world * self.world]
        return batches[self.rank::self.world]

    def __iter__(self):
        return iter(self._mine())

    def __len__(self):
        return len(self._mine())


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(40, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, 4)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def collate(items):
    ids, tags = zip(*items)
    return (pad_sequence(ids, batch_first=True),
            pad_sequence(tags, batch_first=True, padding_value=PAD))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    data = Sentences(900, seed=4)
    order = CurriculumBatches([len(ids) for ids, _ in data.items], 16, [8, 14, 24, 24], rank, world)
    loader = DataLoader(data, batch_sampler=order, collate_fn=collate)

    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        order.epoch = epoch
        seen = torch.zeros(2)
        for ids, tags in loader:
            tokens = (tags != PAD).sum().float()
            all_tokens = tokens.clone()
            dist.all_reduce(all_tokens)
            summed = nn.functional.cross_entropy(
                model(ids).flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction="sum")
            loss = summed * world / all_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.stack([summed.detach(), tokens])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {len(loader)} batches per rank, nll per token {seen[0] / seen[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
