import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_dataset(n=800, dim=20, classes=4):
    g = torch.Generator().manual_seed(1234)
    centers = torch.randn(classes, dim, generator=g) * 2
    y = torch.randint(classes, (n,), generator=g)
    x = centers[y] + torch.randn(n, dim, generator=g) * 2
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self, dim=20, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes))

    def forward(self, x):
        return self.body(x)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(2)
    for x, y in loader:
        stats[0] += (model(x).argmax(1) == y).sum()
        stats[1] += len(y)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    set_seed(args.seed + rank)

    train_set, val_set = random_split(build_dataset(), [640, 160])
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)

    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        acc = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} val acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
