from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUM = 4
IGNORE = -100


class Tagged(Dataset):
    def __init__(self, n=416, vocab=20):
        g = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, vocab, (int(k),), generator=g) for k in torch.randint(3, 20, (n,), generator=g)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.rows[i] % 4


def collate(items):
    x, y = zip(*items)
    pad = nn.utils.rnn.pad_sequence
    return pad(x, batch_first=True), pad(y, batch_first=True, padding_value=IGNORE)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def groups(loader, size):
    it = iter(loader)
    while group := list(islice(it, size)):
        yield group


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = Tagged()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)  # 26 batches: 6 groups and a half
    model = DDP(Tagger())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for group in groups(loader, ACCUM):
            tokens = torch.tensor(float(sum((y != IGNORE).sum() for _, y in group)))
            dist.all_reduce(tokens)
            for i, (x, y) in enumerate(group):
                with model.no_sync() if i < len(group) - 1 else nullcontext():
                    logits = model(x)
                    nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
                    # DDP divides by the world size, the tokens are counted over all ranks and micro-batches
                    (nll * world / tokens).backward()
                stats += torch.tensor([nll.item(), (y != IGNORE).sum().item()])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        dist.all_reduce(stats)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss per token {(stats[0] / stats[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
