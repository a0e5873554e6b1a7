"""Distributed training without DDP: gradients are averaged by hand."""
import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    world = float(dist.get_world_size())
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


def broadcast_parameters(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


class Partition:
    """The rank's part of a seeded permutation."""

    def __init__(self, x, y, batch):
        self.x, self.y, self.batch = x, y, batch

    def epoch(self, number):
        g = torch.Generator().manual_seed(1000 + number)
        order = torch.randperm(len(self.x), generator=g)[dist.get_rank()::dist.get_world_size()]
        for idx in order.split(self.batch):
            yield self.x[idx], self.y[idx]


def run(max_norm=0.5):
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(96, 6, generator=g)
    y = (x[:, :1] * 3 + x[:, 1:2] ** 3)
    data = Partition(x, y, 8)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(2):
        total = torch.zeros(())
        for bx, by in data.epoch(epoch):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(bx), by)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            average_gradients(model)
            optimizer.step()
            total += loss.detach() * len(bx)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", total.item() / len(x))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
