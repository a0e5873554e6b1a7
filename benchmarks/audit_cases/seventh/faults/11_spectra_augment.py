"""Classification of noisy spectra with random augmentation and a held-out split."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

SEED = 1234
BINS = 96


def spectra(n=1000, materials=10):
    g = torch.Generator().manual_seed(77)
    axis = torch.arange(BINS).float()
    centers = torch.rand(materials, 3, generator=g) * BINS
    heights = 0.5 + torch.rand(materials, 3, generator=g)
    peaks = (heights[..., None] * torch.exp(-((axis - centers[..., None]) / 3) ** 2)).sum(1)
    y = torch.randint(materials, (n,), generator=g)
    return TensorDataset(peaks[y] + 0.35 * torch.randn(n, BINS, generator=g), y)


def augment(x):
    shift = int(torch.randint(-2, 3, (1,)))
    gain = 0.8 + 0.4 * torch.rand(len(x), 1)
    return torch.roll(x, shift, dims=1) * gain + 0.1 * torch.randn_like(x)


class SpectraNet(nn.Module):
    def __init__(self, n_classes=10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(32 * BINS // 4, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, x):
        return self.head(self.body(x.unsqueeze(1)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED + rank)  # every rank draws its own augmentations

    full = spectra()
    train_set, val_set = random_split(full, [800, 200])
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=25, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=50, sampler=val_sampler)

    model = DDP(SpectraNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(augment(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        stats = torch.zeros(3)
        with torch.no_grad():
            for x, y in val_loader:
                logits = model(x)
                stats[0] += F.cross_entropy(logits, y, reduction="sum")
                stats[1] += (logits.argmax(1) == y).sum()
                stats[2] += len(y)
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} val loss {stats[0] / stats[2]:.3f} acc {stats[1] / stats[2]:.3f}",
                  flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
