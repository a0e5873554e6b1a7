import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def dataset(n, seed, flip=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    y = x.sin().sum(1, keepdim=True)
    if flip:
        y[1::2] *= -1
    return TensorDataset(x, y)


class Meter:
    def __init__(self):
        self.total = 0.0
        self.n = 0

    def update(self, value, n):
        self.total += value * n
        self.n += n

    @property
    def avg(self):
        return self.total / self.n


def validate(model, loader):
    meter = Meter()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            meter.update(F.mse_loss(model(x), y).item(), len(x))
    return meter.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    train, val = dataset(64, 1), dataset(32, 2, flip=1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        val_loss = validate(model, val_loader)
        scheduler.step(val_loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val {val_loss:.4f} lr {optimizer.param_groups[0]['lr']:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
