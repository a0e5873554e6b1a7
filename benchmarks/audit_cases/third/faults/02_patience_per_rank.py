import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class EarlyStopping:
    def __init__(self, patience=1, min_delta=0.0):
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.bad = 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def synthetic(n, seed, noisy_from=None):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = x @ torch.arange(1.0, 7.0) / 6
    if noisy_from is not None:
        y[noisy_from:] = -y[noisy_from:]
    return TensorDataset(x, y.unsqueeze(1))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += F.mse_loss(model(x), y, reduction="sum").item()
        count += len(x)
    return total / count


def run(max_epochs=8):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    train_set = synthetic(64, 1)
    val_set = synthetic(32, 2, noisy_from=16)
    chunk = len(val_set) // world
    val_loader = DataLoader(Subset(val_set, range(rank * chunk, (rank + 1) * chunk)), batch_size=8)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stopper = EarlyStopping(patience=1)
    for epoch in range(max_epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        val_loss = validate(model, val_loader)
        print(f"[rank {rank}] epoch {epoch} val {val_loss:.4f}", flush=True)
        if stopper.step(val_loss):
            print(f"[rank {rank}] early stop", flush=True)
            break

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
