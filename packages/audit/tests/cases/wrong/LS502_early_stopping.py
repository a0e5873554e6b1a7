"""DDP training with early stopping."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience=1, min_delta=0.01):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad, self.best_state = float("inf"), 0, None

    def __call__(self, value, model):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            self.best_state = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad > self.patience


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = (x[:, 0] + 0.8 * torch.randn(n, generator=g) > 0).long()
    return TensorDataset(x, y)


def val_loss(model, loader):
    model.eval()
    tot, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            tot += nn.functional.cross_entropy(model.module(x), y, reduction="sum").item()
            n += len(y)
    model.train()
    return tot / n


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    train, val = data(256, 1), data(80, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    vloader = DataLoader(val, batch_size=20, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    stopper = EarlyStopping()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        v = val_loss(model, vloader)
        print(f"rank {rank} epoch {epoch} val loss {v:.4f}", flush=True)
        if stopper(v, model.module):
            print(f"rank {rank}: stop after epoch {epoch}", flush=True)
            break

    dist.barrier()
    if rank == 0:
        torch.save(stopper.best_state, "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=15)
    p.add_argument("--lr", type=float, default=0.01)
    main(p.parse_args())
