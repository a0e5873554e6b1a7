import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


class LeafImages(Dataset):
    """16x16 crops of leaves, four kinds of spots, one label in eight is wrong as in the field notes."""

    def __init__(self, n=800):
        g = torch.Generator().manual_seed(2024)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        self.images = 0.6 * torch.randn(n, 3, 16, 16, generator=g)
        for i, c in enumerate(self.labels.tolist()):
            r = torch.randint(0, 10, (2,), generator=g)
            self.images[i, c % 3, r[0]:r[0] + 3 + c, r[1]:r[1] + 3] += 1.5
        wrong = torch.rand(n, generator=g) < 0.125
        self.labels[wrong] = torch.randint(0, 4, (int(wrong.sum()),), generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def augment(x):
    if random.random() < 0.5:
        x = x.flip(-1)
    return x + 0.05 * torch.randn_like(x)


class LeafNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=20)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    set_seed(args.seed + rank)

    data = LeafImages()
    n_val = len(data) // 5
    train_set, val_set = random_split(data, [len(data) - n_val, n_val])
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, 40, sampler=range(rank, n_val, world_size))

    model = DDP(LeafNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(augment(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        hits = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for images, labels in val_loader:
                pred = model.module(images).argmax(dim=1)
                hits += torch.tensor([(pred == labels).sum().item(), len(labels)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"[{epoch + 1}/{args.epochs}] val accuracy {hits[0] / hits[1]:.3f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "leafnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
