"""Regression with a validation split and ReduceLROnPlateau."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Config:
    epochs = 8
    batch_size = 32
    lr = 0.15
    noise = 1.0


def make_split(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    y = (x[:, :2] * x[:, 2:4]).sum(1, keepdim=True) + noise * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


def train(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += nn.functional.mse_loss(model.module(x), y, reduction="sum").item()
        count += len(y)
    return total / count


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cfg = Config()
    torch.manual_seed(0)

    train_set = make_split(512, 1, cfg.noise)
    val_set = make_split(96, 2, cfg.noise)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=cfg.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    scheduler = ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        train(model, train_loader, opt)
        val_loss = validate(model, val_loader)
        scheduler.step(val_loss)
        print(f"rank {rank}/{world} epoch {epoch} val {val_loss:.4f} lr {opt.param_groups[0]['lr']:.5f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
