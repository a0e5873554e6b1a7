import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset


class StridedSampler(Sampler):
    def __init__(self, n, rank, world):
        self.indices = range(rank, n, world)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class ConfusionMatrix:
    def __init__(self, classes):
        self.m = torch.zeros(classes, classes, dtype=torch.long)

    def update(self, pred, target):
        n = len(self.m)
        self.m += torch.bincount(target * n + pred, minlength=n * n).view(n, n)

    def macro_f1(self):
        m = self.m.clone()
        dist.all_reduce(m)
        tp = m.diag().float()
        return (2 * tp / (m.sum(0) + m.sum(1)).clamp(min=1)).mean().item(), int(m.sum())


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=g)
    return TensorDataset(x, x[:, :4].argmax(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = make(128, 0), make(45, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    val_loader = DataLoader(val, 8, sampler=StridedSampler(len(val), rank, world))
    net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        cm = ConfusionMatrix(4)
        with torch.inference_mode():
            for x, y in val_loader:
                cm.update(net(x).argmax(1), y)
        f1, n = cm.macro_f1()
        if rank == 0:
            print(f"epoch {epoch}: macro F1 {f1:.4f} on {n}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
