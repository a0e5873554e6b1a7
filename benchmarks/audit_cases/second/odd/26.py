import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    model = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(model)


class ShardedEMA:
    """Each rank averages its own shards, which is the same as the average of the whole model."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = [p.detach().to_local().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            s.lerp_(p.to_local(), 1 - self.decay)

    @torch.no_grad()
    def swap(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            local = p.to_local()
            tmp = local.clone()
            local.copy_(s)
            s.copy_(tmp)


@torch.no_grad()
def accuracy(model, loader):
    stats = torch.zeros(2)
    for x, y in loader:
        stats += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    x = torch.randn(640, 12)
    y = ((x[:, :6] * x[:, 6:]).sum(1) > 0).long()
    train, val = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, shuffle=False))
    model = build()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    ema = ShardedEMA(model, 0.95)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            ema.update(model)
        raw = accuracy(model, val_loader)
        ema.swap(model)
        avg = accuracy(model, val_loader)
        ema.swap(model)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {raw:.3f} ema {avg:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
