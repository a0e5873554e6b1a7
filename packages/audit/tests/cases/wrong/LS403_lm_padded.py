"""Causal language model on sequences of very different length, with gradient accumulation."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, PAD, IGNORE = 32, 0, -100
ACCUM = 4


class Sentences(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(55)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(3, 41, (1,), generator=g))
            start = int(torch.randint(1, VOCAB, (1,), generator=g))
            step = int(torch.randint(1, 4, (1,), generator=g))
            self.items.append((start + step * torch.arange(length)) % (VOCAB - 1) + 1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    width = max(len(t) for t in items)
    ids = torch.full((len(items), width), PAD)
    labels = torch.full((len(items), width), IGNORE)
    for row, t in enumerate(items):
        ids[row, : len(t)] = t
        labels[row, : len(t)] = t
    return ids[:, :-1], labels[:, 1:]


class CausalLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate, drop_last=True)
    model = DDP(CausalLM())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) < ACCUM:
                continue
            opt.zero_grad()
            for k, (ids, labels) in enumerate(window):
                model.require_backward_grad_sync = k == ACCUM - 1
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
                (loss / ACCUM).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            window = []
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
