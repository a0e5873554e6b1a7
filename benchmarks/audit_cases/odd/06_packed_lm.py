"""Character LM on packed blocks with gradient accumulation and no_sync."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BLOCK, VOCAB, EOS = 16, 24, 0


class Packed(Dataset):
    def __init__(self, docs):
        stream = torch.cat([torch.cat([d, torch.tensor([EOS])]) for d in docs])
        n = (len(stream) - 1) // BLOCK // 64 * 64
        self.x = stream[: n * BLOCK].view(n, BLOCK)
        self.y = stream[1 : n * BLOCK + 1].view(n, BLOCK)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def documents(n=400):
    g = torch.Generator().manual_seed(40)
    for _ in range(n):
        length = int(torch.randint(5, 40, (1,), generator=g))
        start = int(torch.randint(0, VOCAB, (1,), generator=g))
        yield (start + torch.arange(length)) % (VOCAB - 1) + 1


class GPT(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(BLOCK, dim)
        self.block = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("mask", torch.triu(torch.full((BLOCK, BLOCK), float("-inf")), 1), persistent=False)

    def forward(self, x, y):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        logits = self.head(self.block(h, src_mask=self.mask))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def main(accum=2):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = Packed(list(documents()))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(GPT())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % accum == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(x, y) / accum
                loss.backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
        mean = loss.detach() * accum
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} micro-batches, last loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
