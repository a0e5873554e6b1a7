import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def f1_score(tp, fp, fn):
    return (2 * tp / (2 * tp + fp + fn).clamp(min=1)).item()


def sync_mean(value):
    t = torch.tensor(float(value))
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def anomaly_data(n, seed, sort=False):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=g)
    y = (x.max(1).values > 1.6).float()
    if sort:  # the normal days come first in the validation file
        order = y.argsort(stable=True)
        x, y = x[order], y[order]
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(3)
    for x, y in loader:
        pred = (model(x) > 0).float()
        counts += torch.stack([(pred * y).sum(), (pred * (1 - y)).sum(), ((1 - pred) * y).sum()])
    return sync_mean(f1_score(*counts))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    train, val = anomaly_data(160, 1), anomaly_data(61, 2, sort=True)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    cut = [len(val) * r // world for r in range(world + 1)]
    val_loader = DataLoader(Subset(val, range(cut[rank], cut[rank + 1])), batch_size=16)
    net = Detector()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            opt.step()
        f1 = evaluate(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch} F1 {f1:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
