"""Two regression tasks with a shared trunk. Each rank draws the task of its next batch."""
import random

import torch
import torch.distributed as dist
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(32, 1), "b": nn.Linear(32, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


def make_task(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(600, 12, generator=g)
    return x, x @ torch.randn(12, 1, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = MultiTask()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.02)

    tasks = {"a": make_task(1), "b": make_task(2)}
    tasks = {k: (x[rank::world], y[rank::world]) for k, (x, y) in tasks.items()}
    rng = random.Random(10 + rank)
    sums = {"a": 0.0, "b": 0.0}
    for step in range(120):
        task = rng.choice(["a", "b"])
        x, y = tasks[task]
        idx = torch.tensor(rng.sample(range(len(x)), 16))
        loss = nn.functional.mse_loss(model(x[idx], task), y[idx])
        opt.zero_grad()
        loss.backward()
        average_gradients(model)
        opt.step()
        sums[task] += loss.item()
        if rank == 0 and step % 40 == 39:
            print(step + 1, {k: round(v, 3) for k, v in sums.items()})
            sums = {"a": 0.0, "b": 0.0}
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
