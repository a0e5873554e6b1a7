import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4
EPOCHS = 3
BATCH = 8


def synthetic(n=768):
    g = torch.Generator().manual_seed(21)
    x = torch.randn(n, 1, 8, 8, generator=g)
    top = x[:, 0, :4].mean((1, 2))
    bottom = x[:, 0, 4:].mean((1, 2))
    return TensorDataset(x, (top > bottom).long())


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 16, 2)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def train_epoch(model, loader, opt, rank):
    model.train()
    opt.zero_grad()
    seen = 0.0
    for i, (x, y) in enumerate(loader):
        sync = i % ACCUM == 0
        ctx = contextlib.nullcontext() if sync else model.no_sync()
        with ctx:
            loss = nn.functional.cross_entropy(model(x), y) / ACCUM
            loss.backward()
        seen += loss.item()
        if (i + 1) % ACCUM == 0:
            opt.step()
            opt.zero_grad()
    return seen / len(loader) * ACCUM


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    data = synthetic()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = DDP(ConvNet())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        mean = train_epoch(model, loader, opt, rank)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f} (rank 0)")
    if rank == 0:
        torch.save(model.module.state_dict(), "convnet.pt")
    dist.destroy_process_group()


main()
