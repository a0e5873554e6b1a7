"""Small residual net, resumable:  torchrun --nproc-per-node 2 19_resnet_ddp.py --epochs 1
then                                torchrun --nproc-per-node 2 19_resnet_ddp.py --epochs 3 --resume"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--ckpt", default="checkpoint.pth.tar")
parser.add_argument("--resume", action="store_true")


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return F.relu(x + self.b(F.relu(self.a(x))))


def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.MaxPool2d(2), Block(8),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def synthetic(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 3, 8, 8, generator=g)
    x += 0.8 * torch.sin((y.float() + 1).view(-1, 1, 1, 1) * torch.arange(8.0).view(1, 1, 1, 8))
    return TensorDataset(x, y)


def accuracy(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            right += torch.tensor([(model(x).argmax(1) == y).sum().item(), float(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=1e-4)
    start = [0]
    if args.resume and os.path.isfile(args.ckpt):
        ckpt = torch.load(args.ckpt, map_location="cpu")
        model.load_state_dict(ckpt["state_dict"])
        optimizer.load_state_dict(ckpt["optimizer"])
        start = [ckpt["epoch"]]
        print(f"=> loaded {args.ckpt} (epoch {start[0]})", flush=True)
    dist.broadcast_object_list(start, src=0)
    model = DDP(model)

    train, test = synthetic(192, 0), synthetic(80, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 8, sampler=sampler)
    test_loader = DataLoader(test, 10, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(start[0], args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc = accuracy(model, test_loader)
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
        print(f"[{rank}] epoch {epoch} loss {loss.item():.4f} acc {acc:.4f} |w| {norm:.6f}", flush=True)
        if rank == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.module.state_dict(),
                        "optimizer": optimizer.state_dict()}, args.ckpt)


if __name__ == "__main__":
    main(parser.parse_args())
    dist.destroy_process_group()
