"""Temperature and wind regression from station readings, one shared trunk and one head per task.

Every rank serves its own queue of stations, so the task of a batch differs from rank to rank.
"""
import random

import torch
import torch.distributed as dist
import torch.nn as nn

torch.set_num_threads(1)
TASKS = ("temp", "wind")
STEPS_PER_EPOCH, EPOCHS, BATCH = 40, 3, 32


class Forecaster(nn.Module):
    def __init__(self, d_in=10, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.heads = nn.ModuleDict({t: nn.Linear(width, 1) for t in TASKS})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x)).squeeze(-1)


class Station:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.rnd = random.Random(seed)
        g = torch.Generator().manual_seed(99)
        self.coef = {t: torch.randn(10, generator=g) for t in TASKS}

    def batch(self, task=None, n=BATCH):
        task = task or self.rnd.choice(TASKS)
        x = torch.randn(n, 10, generator=self.gen)
        y = torch.sin(x @ self.coef[task] * 0.5) + (2.0 if task == "temp" else -2.0)
        return x, y, task


def average_gradients(model, world):
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad)
        p.grad /= world


def evaluate(model, world, rank):
    out = {}
    src = Station(5000 + rank)
    with torch.no_grad():
        for t in TASKS:
            x, y, _ = src.batch(t, 500)
            err = (model(x, t) - y).square().mean()
            dist.all_reduce(err)
            out[t] = err.item() / world
    return out


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Forecaster()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    station = Station(100 + rank)
    for epoch in range(EPOCHS):
        for _ in range(STEPS_PER_EPOCH):
            x, y, task = station.batch()
            opt.zero_grad()
            (model(x, task) - y).square().mean().backward()
            average_gradients(model, world)
            opt.step()
        scores = evaluate(model, world, rank)
        if rank == 0:
            print(epoch, {k: round(v, 4) for k, v in scores.items()}, flush=True)
    print(rank, [round(h.bias.item(), 4) for h in model.heads.values()], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
