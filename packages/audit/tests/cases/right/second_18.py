import contextlib
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        return x + self.net(x)


class LayerDropNet(nn.Module):
    """Residual network where every block is skipped with some probability while training."""

    def __init__(self, dim=24, depth=4, drop=0.6):
        super().__init__()
        self.stem = nn.Linear(10, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 3)
        self.drop = drop

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and random.random() < self.drop:
                continue
            x = block(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    random.seed(rank)

    x = torch.randn(512, 10)
    y = (x[:, :3] * x[:, 3:6]).argmax(1)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    model = DDP(LayerDropNet(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = torch.zeros(1)
        for i, (xb, yb) in enumerate(loader):
            last = (i + 1) % ACCUM == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = criterion(model(xb), yb)
                (loss / ACCUM).backward()
            seen += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {seen.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
