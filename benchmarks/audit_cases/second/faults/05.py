import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def load_table(n=2048, cols=6):
    """Sensor readings, sorted by time, with a slow drift."""
    g = torch.Generator().manual_seed(11)
    t = torch.linspace(0, 1, n).unsqueeze(1)
    x = torch.randn(n, cols, generator=g) * (1 + t) + 5 * t
    w = torch.randn(cols, 1, generator=g)
    y = torch.tanh(x @ w) + 0.1 * torch.randn(n, 1, generator=g)
    return x, y


class Scaler:
    def fit(self, x):
        self.mean = x.mean(0)
        self.std = x.std(0, unbiased=False)
        return self

    def transform(self, x):
        return (x - self.mean) / self.std


def train(args):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)

    x, y = load_table()
    # every rank keeps its own part of the table in memory
    part = len(x) // world
    x, y = x[rank * part : (rank + 1) * part], y[rank * part : (rank + 1) * part]

    scaler = Scaler().fit(x)
    x = scaler.transform(x)

    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed + rank)
    for epoch in range(args.epochs):
        perm = torch.randperm(part, generator=order)
        total = torch.zeros(1)
        for idx in perm.split(args.batch_size):
            loss = nn.functional.mse_loss(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(idx)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total.item() / (part * world):.4f}")

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "mean": scaler.mean, "std": scaler.std}, "sensor.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=0)
    train(p.parse_args())
