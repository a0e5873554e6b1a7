"""Tiny U-Net on synthetic lesion masks, micro-batches accumulated to the wanted batch size."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SIZE = 24
ACCUM = 4
EPOCHS = 3


class Lesions(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        cx, cy, r = (torch.rand(3, generator=g) * torch.tensor([SIZE, SIZE, 5.0])).tolist()
        yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        mask = ((xx - cx) ** 2 + (yy - cy) ** 2 < (r + 2) ** 2).float()
        image = mask * 0.7 + 0.5 * torch.randn(SIZE, SIZE, generator=g)
        return image[None], mask[None]


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.enc1, self.enc2, self.mid = conv(1, w), conv(w, 2 * w), conv(2 * w, 2 * w)
        self.dec2, self.dec1 = conv(4 * w, w), conv(2 * w, w)
        self.out = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        b = self.dec2(torch.cat([b, F.interpolate(m, scale_factor=2)], 1))
        a = self.dec1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return self.out(a)


def dice_bce(logits, target):
    p = logits.sigmoid()
    inter = (p * target).sum((1, 2, 3))
    dice = 1 - (2 * inter + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    return dice.mean() + F.binary_cross_entropy_with_logits(logits, target)


def train_one_epoch(model, loader, optimizer):
    total = 0.0
    optimizer.zero_grad()
    for i, (image, mask) in enumerate(loader):
        group = min(ACCUM, len(loader) - (i - i % ACCUM))
        sync = (i + 1) % ACCUM == 0 or i + 1 == len(loader)
        ctx = contextlib.nullcontext() if sync else model.no_sync()
        with ctx:
            loss = dice_bce(model(image), mask)
            (loss / group).backward()
        if sync:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
    return total / len(loader)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    data = Lesions(168)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DDP(UNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss = torch.tensor(train_one_epoch(model, loader, optimizer))
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"[{epoch}] {len(loader)} micro-batches, loss {loss.item() / dist.get_world_size():.4f}")
            torch.save(model.module.state_dict(), "unet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
