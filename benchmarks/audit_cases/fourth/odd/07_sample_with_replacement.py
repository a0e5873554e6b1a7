"""Fraud detection with rare positives: batches are drawn with replacement, each rank with its own stream."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.set_num_threads(1)


def payments(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    y = (x[:, 0] + x[:, 1] + 0.5 * torch.randn(n, generator=g) > 2.4).long()
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = payments(4000, 1), payments(1000, 2)
    labels = train.tensors[1]
    share = torch.bincount(labels, minlength=2).float()
    draw = WeightedRandomSampler((1 / share)[labels], num_samples=1280, replacement=True,
                                 generator=torch.Generator().manual_seed(70 + rank))
    loader = DataLoader(train, batch_size=64, sampler=draw)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        x, y = val[rank::world]
        with torch.no_grad():
            p = model.module(x).argmax(1)
        t = torch.stack([((p == 1) & (y == 1)).sum(), (y == 1).sum(), ((p == 1) & (y == 0)).sum(), (y == 0).sum()])
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {epoch} hit rate {t[0] / t[1]:.3f} false alarms {t[2] / t[3]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
