import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_loaders(batch_size):
    g = torch.Generator().manual_seed(99)
    w = torch.randn(10, 1, generator=g)

    def split(n):
        x = torch.randn(n, 10, generator=g)
        return TensorDataset(x, x @ w + torch.randn(n, 1, generator=g))

    train, val = split(256), split(64)
    sampler = DistributedSampler(train)
    return (
        DataLoader(train, batch_size, sampler=sampler),
        DataLoader(val, batch_size, sampler=DistributedSampler(val, shuffle=False)),
        sampler,
    )


def train_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def validate(model, loader):
    model.eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.mse_loss(model(x), y, reduction="sum").item()
            n += len(y)
    return total, n


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_loader, val_loader, sampler = get_loaders(16)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer)
        total, n = validate(model, val_loader)
        stats = torch.tensor([total, n])
        dist.all_reduce(stats)
        scheduler.step((stats[0] / stats[1]).item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val mse {stats[0] / stats[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
