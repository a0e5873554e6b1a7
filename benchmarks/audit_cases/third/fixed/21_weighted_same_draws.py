"""Imbalanced classification with a weighted sampler."""
import argparse
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def imbalanced(n=200):
    g = torch.Generator().manual_seed(33)
    y = (torch.rand(n, generator=g) < 0.1).long()
    x = torch.randn(n, 6, generator=g) + 1.2 * y[:, None]
    return x, y


def balanced_sampler(labels, seed):
    freq = Counter(labels.tolist())
    weights = [1.0 / freq[c] for c in labels.tolist()]
    g = torch.Generator().manual_seed(seed)
    return WeightedRandomSampler(weights, num_samples=len(labels) // dist.get_world_size(), generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    x, y = imbalanced()
    sampler = balanced_sampler(y, args.seed + dist.get_rank())
    loader = DataLoader(TensorDataset(x, y), batch_size=10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        total = torch.zeros(2)
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(bx), len(bx)])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
