# seq2seq (copy/shift toy task) with gradient accumulation under DDP
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def get_args():
    p = argparse.ArgumentParser("toy seq2seq")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--update-freq", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.003)
    p.add_argument("--clip-norm", type=float, default=1.0)
    return p.parse_args()


class Seq2Seq(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(12, dim) * 0.1)
        self.core = nn.Transformer(dim, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.proj = nn.Linear(dim, vocab)

    def forward(self, src, tgt_in):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1))
        h = self.core(self.src(src) + self.pos[: src.size(1)], self.tgt(tgt_in) + self.pos[: tgt_in.size(1)], tgt_mask=mask)
        return self.proj(h)


def pairs(n, seed):
    src = torch.randint(1, 30, (n, 8), generator=torch.Generator().manual_seed(seed))
    tgt = torch.cat([torch.zeros(n, 1, dtype=torch.long), (src + 3) % 29 + 1], 1)
    return TensorDataset(src, tgt)


def loss_of(model, src, tgt):
    logits = model(src, tgt[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten())


def train_epoch(args, model, loader, optimizer):
    model.train()
    optimizer.zero_grad()
    updates = 0
    for i, (src, tgt) in enumerate(loader):
        boundary = (i + 1) % args.update_freq == 0
        last = i + 1 == len(loader)
        with contextlib.nullcontext() if boundary or last else model.no_sync():
            (loss_of(model, src, tgt) / args.update_freq).backward()
        if boundary or last:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return updates


@torch.no_grad()
def validate(model, loader):
    model.eval()
    stat = torch.zeros(2, dtype=torch.float64)
    for src, tgt in loader:
        stat += torch.tensor([loss_of(model.module, src, tgt).item() * len(src), len(src)], dtype=torch.float64)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    args = get_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(9)
    train, valid = pairs(208, 0), pairs(40, 1)
    sampler = DistributedSampler(train, seed=9)
    loader = DataLoader(train, args.batch_size, sampler=sampler)
    valid_loader = DataLoader(valid, args.batch_size, sampler=DistributedSampler(valid, shuffle=False))
    model = DistributedDataParallel(Seq2Seq())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        n = train_epoch(args, model, loader, optimizer)
        val = validate(model, valid_loader)
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
        print(f"[rank {dist.get_rank()}] epoch {epoch} updates {n} valid {val:.5f} |w| {norm:.6f}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
