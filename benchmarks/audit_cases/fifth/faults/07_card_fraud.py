"""Fraud detection on card transactions, classes balanced by weighted sampling."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def transactions(n, seed):
    g = torch.Generator().manual_seed(seed)
    fraud = (torch.rand(n, generator=g) < 0.04).long()
    x = torch.randn(n, 12, generator=g)
    x[:, :3] += 1.1 * fraud[:, None]
    x[:, 3] = x[:, 3] * (1 + fraud)
    return x, fraud


class Detector(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, hidden), nn.LayerNorm(hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def balanced_sampler(labels, num_samples, generator=None):
    freq = torch.bincount(labels).float()
    weights = (1.0 / freq)[labels]
    return WeightedRandomSampler(weights, num_samples, replacement=True, generator=generator)


def confusion(net, x, y, rank, world):
    net.eval()
    with torch.no_grad():
        pred = (net(x[rank::world]) > 0).long()
    truth = y[rank::world]
    counts = torch.bincount(truth * 2 + pred, minlength=4)
    dist.all_reduce(counts)
    net.train()
    return counts.tolist()


def train(args, rank, world):
    x, y = transactions(6000, seed=31)
    x_test, y_test = transactions(1501, seed=32)
    torch.manual_seed(args.seed)

    data = TensorDataset(x, y)
    sampler = balanced_sampler(y, len(data) // world)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(Detector())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=args.lr, total_steps=args.epochs * len(loader))
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        for xb, yb in loader:
            opt.zero_grad(set_to_none=True)
            loss = bce(model(xb), yb.float())
            loss.backward()
            opt.step()
            sched.step()
        tn, fp, fn, tp = confusion(model.module, x_test, y_test, rank, world)
        if rank == 0:
            precision, recall = tp / max(tp + fp, 1), tp / max(tp + fn, 1)
            print(f"epoch {epoch}: precision {precision:.3f} recall {recall:.3f}")
    return model.module


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    net = train(args, rank, world)
    if rank == 0:
        torch.save(net.state_dict(), "detector.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
