import argparse
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MetricBook:
    """Sums of metrics, to be shared by all processes."""

    def __init__(self):
        self.sums = defaultdict(float)
        self.n = 0

    def add(self, n, **values):
        self.n += n
        for k, v in values.items():
            self.sums[k] += float(v) * n

    def reduce(self):
        names = {k for k in self.sums if not k.startswith("_")}
        n = torch.tensor(float(self.n))
        dist.all_reduce(n)
        result = {}
        for name in names:
            t = torch.tensor(self.sums[name])
            dist.all_reduce(t)
            result[name] = (t / n).item()
        return result


def evaluate(model, loader):
    book = MetricBook()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            p = model.module(x).squeeze(1)
            err = p - y
            book.add(
                len(y),
                mse=err.square().mean(),
                mae=err.abs().mean(),
                bias=err.mean(),
                within_half=(err.abs() < 0.5).float().mean(),
                target_mean=y.mean(),
                huber=nn.functional.smooth_l1_loss(p, y),
            )
    model.train()
    return book.reduce()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    g = torch.Generator().manual_seed(41)
    x = torch.randn(640, 6, generator=g)
    y = 3 + x[:, 0] * 2 - x[:, 1].abs()
    train_set, val_set = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=32, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in train_loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(xb).squeeze(1), yb).backward()
            opt.step()
        metrics = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(epoch, " ".join(f"{k}={v:.3f}" for k, v in sorted(metrics.items())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
