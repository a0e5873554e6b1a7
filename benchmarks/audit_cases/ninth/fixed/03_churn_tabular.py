"""Churn prediction: MLP over tabular features, hold-out of 20 percent for model selection."""
import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_customers(n=1200, d=30):
    rng = np.random.default_rng(2024)
    x = rng.normal(size=(n, d)).astype(np.float32)
    w = rng.normal(size=d)
    p = 1 / (1 + np.exp(-(x @ w) / 3))
    y = (rng.random(n) < p).astype(np.float32)
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


class ChurnNet(nn.Module):
    def __init__(self, d, width=128, dropout=0.1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(d, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.body(x).squeeze(1)


@torch.no_grad()
def evaluate(model, loader, loss_fn):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logit = model.module(x)
        stats[0] += loss_fn(logit, y).item() * len(y)
        stats[1] += ((logit > 0).float() == y).sum().item()
        stats[2] += len(y)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # different dropout masks on each process
    seed_everything(args.seed + rank)

    data = load_customers()
    n_val = len(data) // 5
    split_rng = torch.Generator().manual_seed(args.seed)
    train_set, val_set = random_split(data, [len(data) - n_val, n_val], generator=split_rng)

    train_sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    val_sampler = DistributedSampler(val_set, num_replicas=world, rank=rank, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=120, sampler=val_sampler)

    model = DDP(ChurnNet(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    loss_fn = nn.BCEWithLogitsLoss()

    best = float("inf")
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        val_loss, val_acc = evaluate(model, val_loader, loss_fn)
        if rank == 0:
            print(f"epoch {epoch}: val loss {val_loss:.4f} val acc {val_acc:.4f}")
            if val_loss < best:
                best = val_loss
                torch.save(model.module.state_dict(), "churn_best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
