import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class FlatGradients:
    def __init__(self, model):
        self.params = list(model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in self.params))
        offset = 0
        for p in self.params:
            p.grad = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def zero(self):
        self.flat.zero_()

    def average(self):
        work = dist.all_reduce(self.flat, async_op=True)
        work.wait()
        self.flat.div_(dist.get_world_size())


def worker(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 24), nn.SiLU(), nn.Linear(24, 1))
    grads = FlatGradients(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(128, 5, generator=g)
    y = (x * torch.arange(5.0)).sum(1, keepdim=True)
    for epoch in range(2):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(epoch))
        for step in order.split(8 * world):
            mine = step[rank::world]
            grads.zero()
            loss = nn.functional.mse_loss(model(x[mine]), y[mine])
            loss.backward()
            grads.average()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: rank 0's last loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2, free_port()), nprocs=2)
