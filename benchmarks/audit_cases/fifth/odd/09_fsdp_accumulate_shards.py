"""FSDP2 with gradient accumulation that reduces only on the last micro-batch, and checkpoints in which every
process keeps its own shard; training goes on from the reloaded shards."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Mixer(nn.Module):
    def __init__(self, d_in=30, width=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


def chemistry(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 30, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:6].sum(1).tanh(), x[:, 7].abs()], 1)
    return TensorDataset(x, y)


def local_part(model):
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def save_shard(model, path):
    torch.save(local_part(model), path)


def load_shard(model, path):
    part = torch.load(path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(part[name])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--accumulate", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(12)

    data = chemistry(2048, seed=3)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    windows = len(loader) // args.accumulate

    model = Mixer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shard_file = f"mixer_shard{rank}of{world}.pt"

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch > 0:
            load_shard(model, shard_file)
        batches = iter(loader)
        total = torch.zeros(2)
        for _ in range(windows):
            for k in range(args.accumulate):
                last = k == args.accumulate - 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                x, y = next(batches)
                loss = nn.functional.mse_loss(model(x), y)
                (loss / args.accumulate).backward()
                total += torch.tensor([loss.item(), 1.0])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
        save_shard(model, shard_file)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {windows} updates, mean loss {total[0] / total[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
