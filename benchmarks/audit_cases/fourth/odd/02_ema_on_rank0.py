"""Leaf shapes; only rank 0 keeps the weight average and only rank 0 evaluates it."""
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def leaves(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    ang = torch.linspace(0, 6.283, 32)
    r = 1 + 0.3 * torch.cos((y[:, None] + 2) * ang + torch.rand(n, 1, generator=g))
    return TensorDataset(r + 0.15 * torch.randn(n, 32, generator=g), y)


def accuracy(net, data):
    was = net.training
    net.eval()
    with torch.no_grad():
        x, y = data.tensors
        acc = (net(x).argmax(1) == y).float().mean().item()
    net.train(was)
    return acc


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train, test = leaves(768, 1), leaves(256, 2)
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model = DDP(net)
    ema = copy.deepcopy(net) if rank == 0 else None
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            if ema is not None:
                with torch.no_grad():
                    for e, p in zip(ema.parameters(), net.parameters()):
                        e.mul_(0.9).add_(p, alpha=0.1)
                    for e, b in zip(ema.buffers(), net.buffers()):
                        e.copy_(b)
        if rank == 0:
            plain, avg = accuracy(net, test), accuracy(ema, test)
            print(f"epoch {epoch}: plain {plain:.3f} average {avg:.3f}", flush=True)
            if avg > best:
                best = avg
                torch.save(ema.state_dict(), "leaf_ema.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
