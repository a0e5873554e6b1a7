from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


@dataclass
class Config:
    epochs: int = 4
    batch_size: int = 16
    max_lr: float = 0.3
    hidden: int = 32
    seed: int = 19


def wines(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 11, generator=g)
    q = (x[:, 0] - 0.8 * x[:, 1] * x[:, 2] + 0.5 * torch.randn(n, generator=g))
    return TensorDataset(x, torch.bucketize(q, torch.tensor([-0.6, 0.6])))


def evaluate(net, data, rank, world):
    x, y = data[rank::world]
    net.eval()
    with torch.no_grad():
        out = net(x)
        s = torch.stack([nn.functional.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum().float()])
    net.train()
    dist.all_reduce(s)
    return (s / len(data)).tolist()


def main(cfg=Config()):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    train, val = wines(960, 1), wines(240, 2)
    sampler = DistributedSampler(train, seed=cfg.seed)
    loader = DataLoader(train, cfg.batch_size, sampler=sampler)

    net = nn.Sequential(nn.Linear(11, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, cfg.hidden), nn.ReLU(),
                        nn.Linear(cfg.hidden, 3))
    ddp = DDP(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=cfg.max_lr, momentum=0.9, weight_decay=1e-4)
    steps_per_epoch = len(loader)
    sched = OneCycleLR(opt, max_lr=cfg.max_lr, total_steps=cfg.epochs * steps_per_epoch, pct_start=0.25)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        ce, acc = evaluate(net, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.5f} val loss {ce:.4f} acc {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
