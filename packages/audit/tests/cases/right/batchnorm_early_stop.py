"""Bearing faults: BatchNorm statistics stay local while training and are averaged before each validation.

Training may end early; that is decided from a number that all ranks have.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CLASSES, LENGTH = 5, 64
MAX_EPOCHS, PATIENCE = 12, 2


def vibrations(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(LENGTH, dtype=torch.float32)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    x = torch.sin(0.3 * (y[:, None] + 1) * t + phase) + 1.5 * torch.randn(n, LENGTH, generator=g)
    return TensorDataset(x[:, None], y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 9, padding=4), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(),
        )
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.fc(self.body(x).mean(-1))


@torch.no_grad()
def average_statistics(model):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            for buf in (m.running_mean, m.running_var):
                dist.all_reduce(buf)
                buf /= dist.get_world_size()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model.module(x)
        loss = F.cross_entropy(logits, y, reduction="sum").item()
        stats += torch.tensor([loss, (logits.argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    train, val = vibrations(960, 1), vibrations(251, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=6)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    # strided and not padded: 126 and 125 rows, each scored once; no collective inside the loop
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=64)

    model = DDP(Net(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)

    best, bad_epochs = float("inf"), 0
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        average_statistics(model)
        val_loss, val_acc = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} train {stats[0] / stats[1]:.4f} val {val_loss:.4f} acc {val_acc:.4f}", flush=True)

        # val_loss is the same number on all ranks: they save, wait and stop together
        if val_loss < best - 1e-3:
            best, bad_epochs = val_loss, 0
            if rank == 0:
                torch.save(model.module.state_dict(), "bearing_best.pt")
        else:
            bad_epochs += 1
            if bad_epochs >= PATIENCE:
                break
    if rank == 0:
        print(f"ended after epoch {epoch}, best val loss {best:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
