import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = int(os.environ.get("ACCUM", 4))
EPOCHS = 2


class Regressor(nn.Module):
    def __init__(self, d=8, h=24):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.mid = nn.Linear(h, h)
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        return self.out(torch.relu(self.mid(x)) + x).squeeze(-1)


def get_loader(batch_size=4):
    g = torch.Generator().manual_seed(21)
    x = torch.randn(128, 8, generator=g)
    y = torch.sin(x).sum(1)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, batch_size=batch_size, sampler=sampler), sampler


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(100)
    model = DDP(Regressor())
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, sampler = get_loader()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for i, (x, y) in enumerate(loader):
            is_sync = (i + 1) % ACCUM == 0
            ctx = contextlib.nullcontext() if is_sync else model.no_sync()
            with ctx:
                loss = nn.functional.mse_loss(model(x), y) / ACCUM
                loss.backward()
            running += loss.detach()
            if (i + 1) % ACCUM == 0:
                optim.step()
                optim.zero_grad()
        dist.all_reduce(running)
        if rank == 0:
            steps = len(loader) // ACCUM * dist.get_world_size()
            print(f"epoch {epoch}: {running.item() / steps:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
