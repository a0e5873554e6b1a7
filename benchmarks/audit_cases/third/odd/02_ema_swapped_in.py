import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class EMA:
    def __init__(self, params, decay=0.95):
        self.params = list(params)
        self.decay = decay
        self.shadow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.params], 1 - self.decay)

    @contextlib.contextmanager
    def applied(self):
        with torch.no_grad():
            backup = [p.clone() for p in self.params]
            for p, s in zip(self.params, self.shadow):
                p.copy_(s)
            try:
                yield
            finally:
                for p, b in zip(self.params, backup):
                    p.copy_(b)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    train, test = data(96, 1), data(51, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 8)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
    model = DDP(net)
    ema = EMA(net.parameters())
    opt = torch.optim.AdamW(model.parameters(), 5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            ema.update()
        hits = torch.zeros(2, dtype=torch.long)
        with ema.applied():
            for x, y in test_loader:
                hits += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: {hits[0].item()}/{hits[1].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
