import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def patches(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    x = torch.randn(n, 1, 8, 8, generator=g)
    x[torch.arange(n), 0, :, 2 * y] += 1.0
    return TensorDataset(x, y)


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4),
    )


@torch.no_grad()
def average_batchnorm(model):
    """Running statistics are local while training ("ghost" batch norm) and averaged before they are used."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for buf in (m.running_mean, m.running_var):
                dist.all_reduce(buf)
                buf /= dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    s = torch.zeros(2)
    for x, y in loader:
        s += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    model.train()
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = patches(512, 0), patches(128, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(net(), forward_sync_buffers=False)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.SGD(
        [{"params": decay, "weight_decay": 1e-3}, {"params": rest, "lr": 0.1}], lr=0.05, momentum=0.9
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        average_batchnorm(model.module)
        acc = evaluate(model.module, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
