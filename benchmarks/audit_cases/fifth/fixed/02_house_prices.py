"""Tabular regression of house prices with an MLP, learning rate lowered when validation stalls."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 8
BATCH = 32


def load_houses(n=1503, seed=7):
    g = torch.Generator().manual_seed(seed)
    area = torch.rand(n, 1, generator=g) * 2
    rooms = torch.randint(1, 7, (n, 1), generator=g).float() / 3
    rest = torch.randn(n, 6, generator=g)
    price = 1.5 * area + 0.4 * rooms * area + torch.sin(rest[:, :1]) - 0.3 * rest[:, 1:2] * area
    price = price + 0.6 * torch.randn(n, 1, generator=g)
    return torch.cat([area, rooms, rest], 1), price


class PriceNet(nn.Module):
    def __init__(self, d_in=8, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(d_in, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.layers(x)


def train_epoch(model, loader, optimizer):
    model.train()
    running = torch.zeros(2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        running += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(running)
    return (running[0] / running[1]).item()


@torch.no_grad()
def validate(net, loader):
    net.eval()
    sq, count = 0.0, 0
    for x, y in loader:
        sq += nn.functional.mse_loss(net(x), y, reduction="sum").item()
        count += len(x)
    return sq, count


def main():
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(13)

    x, y = load_houses()
    train_set = TensorDataset(x[:1200], y[:1200])
    val_set = TensorDataset(x[1200:], y[1200:])
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, seed=13)
    train_loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=128)

    model = DistributedDataParallel(PriceNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min", factor=0.3, patience=0, threshold=1e-2)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, train_loader, optimizer)
        sq, count = validate(model.module, val_loader)
        total = torch.tensor([sq, float(count)])
        dist.all_reduce(total)
        val_loss = (total[0] / total[1]).item()
        scheduler.step(val_loss)

        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch:2d}  train {train_loss:.4f}  "
                  f"val {val_loss:.4f}  lr {lr:.2e}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "price_net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
