"""Forecast the electric load of many sites with a GRU, with early stopping."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MAX_EPOCHS = 25
PATIENCE = 2
WINDOW = 24


def make_sites(n_sites=32, length=240):
    g = torch.Generator().manual_seed(5)
    t = torch.arange(length).float()
    level = torch.rand(n_sites, 1, generator=g) + 0.5
    phase = 6.28 * torch.rand(n_sites, 1, generator=g)
    noise = torch.linspace(0.02, 1.2, n_sites).unsqueeze(1)
    return level * torch.sin(2 * torch.pi * t / 24 + phase) + noise * torch.randn(n_sites, length, generator=g)


def windows(series):
    w = series.unfold(1, WINDOW + 1, 6).reshape(-1, WINDOW + 1)
    return TensorDataset(w[:, :WINDOW].unsqueeze(-1).contiguous(), w[:, WINDOW:].contiguous())


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1])


class EarlyStopping:
    def __init__(self, patience, min_delta=2e-3):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad, self.state = float("inf"), 0, None

    def update(self, value, model):
        if value < self.best - self.min_delta:
            self.best, self.bad, self.state = value, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += nn.functional.mse_loss(model(x), y, reduction="sum").item()
        count += len(y)
    sums = torch.tensor([total, float(count)], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    series = make_sites()
    train, val = windows(series[:, :168]), windows(series[:, 168:])
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    train_loader = DataLoader(train, batch_size=32, sampler=sampler)
    share = len(val) // world
    last = len(val) if rank == world - 1 else (rank + 1) * share
    val_loader = DataLoader(Subset(val, range(rank * share, last)), batch_size=64)

    model = DDP(Forecaster())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    stopper = EarlyStopping(PATIENCE)
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        val_loss = validate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: val mse {val_loss:.4f}", flush=True)
        if stopper.update(val_loss, model.module):
            break

    if stopper.state is not None:
        model.module.load_state_dict(stopper.state)
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "forecaster.pt")
        print("best val mse", round(stopper.best, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
