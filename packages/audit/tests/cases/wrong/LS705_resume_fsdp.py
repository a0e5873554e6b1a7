"""FSDP2 training with a checkpoint at the end of each run; start with --resume to go on."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     set_model_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CKPT = "checkpoint.pt"


def spirals(n=1200, arms=4):
    g = torch.Generator().manual_seed(8)
    label = torch.randint(arms, (n,), generator=g)
    radius = torch.rand(n, generator=g)
    angle = 4 * radius + label * (6.2832 / arms) + 0.15 * torch.randn(n, generator=g)
    xy = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(xy, label)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), Residual(64), Residual(64), nn.Linear(64, 4))
    for layer in model:
        if isinstance(layer, Residual):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def save(model, optimizer, epoch):
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": epoch}, CKPT)
    dist.barrier()


def load(model, optimizer):
    ckpt = torch.load(CKPT, map_location="cpu", weights_only=False)
    set_model_state_dict(model, ckpt["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"] + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(init_device_mesh("cpu", (world,)))
    start = load(model, optimizer) if args.resume else 0

    data = spirals()
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=30, sampler=sampler)
    for epoch in range(start, start + args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for xy, label in loader:
            loss = F.cross_entropy(model(xy), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[1]:.4f}", flush=True)
    save(model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
