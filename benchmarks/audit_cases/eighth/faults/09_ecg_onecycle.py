"""Heartbeat classification with a residual 1-d CNN and a one-cycle schedule."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4
BATCH = 32
MAX_LR = 6e-3


def beats(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.linspace(-1, 1, 128)
    centre = torch.tensor([0.0, 0.15, -0.15])[y].unsqueeze(1) + 0.05 * torch.randn(n, 1, generator=g)
    width = torch.tensor([0.05, 0.09, 0.05])[y].unsqueeze(1)
    qrs = torch.exp(-((t - centre) ** 2) / (2 * width**2))
    wave = 0.3 * torch.exp(-((t - centre - 0.4) ** 2) / 0.02)
    return TensorDataset((qrs + wave + 0.25 * torch.randn(n, 128, generator=g)).unsqueeze(1), y)


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(c, c, 7, padding=3), nn.GroupNorm(4, c), nn.ReLU(), nn.Conv1d(c, c, 7, padding=3), nn.GroupNorm(4, c)
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def build():
    return nn.Sequential(
        nn.Conv1d(1, 16, 7, stride=2, padding=3), nn.ReLU(), Res(16), nn.MaxPool1d(2), Res(16),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 3),
    )


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(100)

    train_set = beats(1024, seed=1)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)

    model = DDP(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=MAX_LR / 25, weight_decay=0.02)
    steps_per_epoch = math.ceil(len(train_set) / BATCH)
    scheduler = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=EPOCHS * steps_per_epoch, pct_start=0.25)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(3)
        for x, y in loader:
            out = model(x)
            loss = criterion(out, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            stats += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.4f} acc {stats[1] / stats[2]:.3f} lr {scheduler.get_last_lr()[0]:.2e}")

    if rank == 0:
        torch.save(model.module.state_dict(), "ecg.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
