"""Streaming training: each process reads its own list of shard files."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SHARDS = {
    "part-000": 150,
    "part-001": 128,
    "part-002": 150,
    "part-003": 128,
}


def read_shard(name, size):
    g = torch.Generator().manual_seed(int(name.split("-")[1]))
    w = torch.linspace(-1, 1, 16)
    for _ in range(size):
        x = torch.randn(16, generator=g)
        yield x, (x @ w).unsqueeze(0)


class ShardStream(IterableDataset):
    def __init__(self, rank, world):
        names = sorted(SHARDS)
        self.names = names[rank::world]
        self.limit = min(sum(SHARDS[n] for n in names[r::world]) for r in range(world))

    def __iter__(self):
        left = self.limit
        for name in self.names:
            for sample in read_shard(name, SHARDS[name]):
                if left == 0:
                    return
                left -= 1
                yield sample


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    stream = ShardStream(rank, world)
    loader = DataLoader(stream, batch_size=args.batch_size)

    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(net.parameters(), lr=0.02)

    for epoch in range(args.epochs):
        n = 0
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            opt.step()
            n += 1
        print(f"rank {rank} epoch {epoch}: {n} batches")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
