"""Anchor-grid ship detector on synthetic satellite tiles. Many tiles are open water."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

GRID, CELL = 8, 4


class Tiles(Dataset):
    def __init__(self, n=256, p_ship=0.45):
        g = torch.Generator().manual_seed(99)
        side = GRID * CELL
        self.images = 0.3 * torch.randn(n, 1, side, side, generator=g)
        self.objectness = torch.zeros(n, GRID, GRID)
        self.boxes = torch.zeros(n, 4, GRID, GRID)
        has_ship = torch.rand(n, generator=g) < p_ship
        for i in range(n):
            if not has_ship[i]:
                continue
            r, c = torch.randint(0, GRID - 1, (2,), generator=g).tolist()
            h, w = torch.randint(2, 2 * CELL, (2,), generator=g).tolist()
            y, x = r * CELL, c * CELL
            self.images[i, 0, y:y + h, x:x + w] += 1.0
            self.objectness[i, r, c] = 1.0
            self.boxes[i, :, r, c] = torch.tensor([0.0, 0.0, h, w]) / CELL

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.objectness[i], self.boxes[i]


class Detector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(),
        )
        self.predict = nn.Conv2d(width, 5, 3, padding=1)

    def forward(self, x):
        out = self.predict(self.features(x))
        return out[:, 0], out[:, 1:]


def detection_loss(logits, offsets, objectness, boxes):
    cls = F.binary_cross_entropy_with_logits(logits, objectness)
    positive = objectness.unsqueeze(1)
    reg = (F.smooth_l1_loss(offsets, boxes, reduction="none") * positive).sum()
    return cls + reg / (4 * positive.sum())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)

    tiles = Tiles()
    sampler = DistributedSampler(tiles, shuffle=True, seed=4)
    loader = DataLoader(tiles, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    start = time.time()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        running, used = 0.0, 0
        for images, objectness, boxes in loader:
            if objectness.sum() == 0:
                continue
            logits, offsets = model(images)
            loss = detection_loss(logits, offsets, objectness, boxes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
            used += 1
        if rank == 0:
            print(f"epoch {epoch} loss {running / used:.4f} ({time.time() - start:.1f}s)", flush=True)

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "detector.pt")
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
