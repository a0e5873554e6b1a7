import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def demo_basic(rank, world_size, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train(rank, world_size)
    dist.destroy_process_group()


def train(rank, world_size):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 10, generator=g)
    y = x[:, :5] - x[:, 5:]
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world_size]
        for idx in order.split(16):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[idx]), y[idx])
            loss.backward()
            optimizer.step()
        print(f"rank {rank} epoch {epoch} last batch {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        world = 2
        mp.spawn(demo_basic, args=(world, free_port()), nprocs=world, join=True)
