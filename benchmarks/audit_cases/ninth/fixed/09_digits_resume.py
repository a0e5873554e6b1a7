"""Small CNN on glyph images; can be stopped and continued with --resume."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_glyphs(n=800, classes=10, size=12):
    g = torch.Generator().manual_seed(13)
    protos = (torch.rand(classes, size, size, generator=g) > 0.6).float()
    y = torch.randint(0, classes, (n,), generator=g)
    x = protos[y] + 0.7 * torch.randn(n, size, size, generator=g)
    return TensorDataset(x[:, None], y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc = nn.Linear(24 * 9, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.fc(x.flatten(1))


def save_checkpoint(path, model, optimizer, epoch):
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
        path,
    )


def load_checkpoint(path, model, optimizer):
    ckpt = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"] + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ckpt", default="glyphs.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    start = torch.zeros(1, dtype=torch.long)
    if args.resume and os.path.exists(args.ckpt):
        start[0] = load_checkpoint(args.ckpt, model, optimizer)
        if rank == 0:
            print(f"resuming {args.ckpt} at epoch {start.item()}")
    dist.broadcast(start, src=0)
    model = DDP(model)

    data = make_glyphs()
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=20, sampler=sampler)

    for epoch in range(int(start), args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(y), (logits.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[2]:.4f} acc {stats[1] / stats[2]:.4f}")
            save_checkpoint(args.ckpt, model.module, optimizer, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
