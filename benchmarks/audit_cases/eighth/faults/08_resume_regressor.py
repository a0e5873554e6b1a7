"""Property regression on synthetic molecule descriptors; training can be continued."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = "last.pt"


def descriptors(n=1536, seed=21):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=g)
    w = torch.randn(24, generator=g)
    y = torch.tanh(x @ w / 3) + 0.5 * x[:, 0] * x[:, 1] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, y.unsqueeze(1))


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--lr", type=float, default=3e-3)
    return p.parse_args()


def save(net, optimizer, epoch):
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, CKPT)


def load(net, optimizer):
    ckpt = torch.load(CKPT, map_location="cpu")
    net.load_state_dict(ckpt["net"])
    optimizer.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"] + 1


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(33)

    train = descriptors()
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=64, sampler=sampler)

    net = nn.Sequential(nn.Linear(24, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)

    start = torch.zeros(1, dtype=torch.long)
    if args.resume:
        if rank == 0:
            start[0] = load(net, optimizer)
        dist.broadcast(start, src=0)
    model = DDP(net)

    for epoch in range(int(start), args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for x, y in loader:
            loss = F.smooth_l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: train loss {total[0] / total[1]:.4f}")
            save(net, optimizer, epoch)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
