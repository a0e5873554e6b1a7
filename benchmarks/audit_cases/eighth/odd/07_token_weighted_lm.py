"""Language model on sentences of very different length, batched by length, with accumulation."""
import contextlib
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

ACCUM, BATCH, EPOCHS, PAD = 2, 16, 3, 0


class Arithmetic(Dataset):
    """Counting sequences with a hidden stride; 4 to 40 tokens long."""

    def __init__(self, n=1024, seed=2):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            start, stride = rng.randrange(20), rng.choice([1, 3, 7])
            self.rows.append(torch.tensor([1 + (start + stride * k) % 20 for k in range(rng.randint(4, 40))]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class LengthBatches(Sampler):
    """Batches of similar length; all ranks draw the same order and take every world-th batch."""

    def __init__(self, lengths, rank, world):
        self.lengths, self.rank, self.world, self.epoch = lengths, rank, world, 0

    def __iter__(self):
        rng = random.Random(1000 + self.epoch)
        self.epoch += 1
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + 4 * rng.random())
        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        rng.shuffle(batches)
        return iter(batches[self.rank :: self.world])

    def __len__(self):
        return len(self.lengths) // BATCH // self.world


class LM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(21, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 21)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data = Arithmetic()
    batches = LengthBatches([len(r) for r in data.rows], rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=lambda r: pad_sequence(r, batch_first=True, padding_value=PAD))
    assert len(data) % (BATCH * world * ACCUM) == 0

    model = DDP(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(EPOCHS):
        seen = torch.zeros(2)
        window = []
        for tokens in loader:
            window.append(tokens)
            if len(window) < ACCUM:
                continue
            count = torch.tensor(float(sum((t[:, 1:] != PAD).sum().item() for t in window)))
            seen[1] += count
            dist.all_reduce(count)
            optimizer.zero_grad()
            for k, t in enumerate(window):
                with model.no_sync() if k + 1 < ACCUM else contextlib.nullcontext():
                    logits = model(t[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
                    # DDP takes the mean over ranks, so times world gives the mean over all tokens
                    (loss * world / count).backward()
                seen[0] += loss.item()
            optimizer.step()
            window = []
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: loss per token {seen[0] / seen[1]:.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
