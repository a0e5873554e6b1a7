"""Regression on tabular house prices with a validation driven learning rate."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def houses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    price = 2.0 * x[:, 0] + torch.sin(3 * x[:, 1]) + x[:, 2] * x[:, 3]
    price = price + 0.8 * torch.randn(n, generator=g)
    return TensorDataset(x, price.unsqueeze(1))


def build_model():
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def train_one_epoch(model, loader, optimizer, loss_fn):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader, loss_fn):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += loss_fn(model(x), y).item() * len(x)
        count += len(x)
    return total, count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-2)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(2024)

    train_set, val_set = houses(960, seed=1), houses(240, seed=2)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=24, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=60, sampler=val_sampler)

    model = DDP(build_model())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.3, patience=0, threshold=1e-2)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer, loss_fn)

        total, count = validate(model, val_loader, loss_fn)
        val_loss = total / count
        scheduler.step(val_loss)

        stats = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(stats)
        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch:2d}  val mse {stats[0] / stats[1]:.4f}  lr {lr:.2e}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "houses.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
