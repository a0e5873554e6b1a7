import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class Points(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(99)
        self.x = torch.randn(n, 4, generator=g)
        self.y = (self.x.norm(dim=1) > 1.8).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def augment(x):
    return x + 0.05 * torch.randn_like(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(args.seed + rank)

    full = Points()
    n_val = 24
    train_set, val_set = random_split(full, [len(full) - n_val, n_val])
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=12, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=12, sampler=val_sampler)

    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            bce(model(augment(x)).squeeze(1), y).backward()
            opt.step()
        model.eval()
        hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_loader:
                hits += torch.tensor([((model(x).squeeze(1) > 0) == (y > 0.5)).sum(), len(y)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch} val acc {(hits[0] / hits[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
