"""Hourly PM2.5 forecasting with a small GRU, one process per device."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WINDOW = 24
EPOCHS = 8


def make_series(n=1600, seed=7):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(n).float()
    daily = torch.sin(2 * math.pi * t / 24)
    weekly = 0.5 * torch.sin(2 * math.pi * t / 168)
    return daily + weekly + 0.6 * torch.randn(n, generator=g)


def windows(series):
    xs = series.unfold(0, WINDOW + 1, 1)
    return TensorDataset(xs[:, :WINDOW, None].clone(), xs[:, WINDOW:].clone())


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def evaluate(model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.mse_loss(model(x), y, reduction="sum").item()
            count += y.numel()
    model.train()
    return total / count


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)

    series = make_series()
    train_set, val_set = windows(series[:1300]), windows(series[1300:])
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=1)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=64, sampler=val_sampler)

    model = DDP(Forecaster())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min", factor=0.3, patience=0, threshold=5e-3
    )

    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        val_loss = evaluate(model, val_loader)
        scheduler.step(val_loss)

        logged = torch.tensor(val_loss)
        dist.all_reduce(logged)
        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch} val mse {logged.item() / world:.4f} lr {lr:.5f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(os.getcwd(), "pm25.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
