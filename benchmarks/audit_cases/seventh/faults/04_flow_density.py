"""Small normalizing flow (actnorm + affine coupling) for tabular density estimation."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

DIM = 6


def sensor_table(n=2400):
    g = torch.Generator().manual_seed(5)
    base = torch.randn(n, 2, generator=g)
    mix = torch.randn(2, DIM, generator=g)
    x = torch.tanh(base @ mix) * torch.tensor([1., 5., 20., .1, 3., 50.])
    return x + torch.tensor([0., 2., 100., 0., -4., 10.]) + 0.05 * torch.randn(n, DIM, generator=g)


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    @torch.no_grad()
    def initialize(self, x):
        self.loc.data.copy_(-x.mean(0))
        self.log_scale.data.copy_(-torch.log(x.std(0) + 1e-6))
        self.initialized.fill_(1)

    def forward(self, x):
        if self.initialized.item() == 0:
            self.initialize(x)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.flip = flip
        half = dim // 2
        self.net = nn.Sequential(nn.Linear(half, 48), nn.Tanh(), nn.Linear(48, 2 * half))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        out = torch.cat([b, a] if self.flip else [a, b], dim=1)
        return out, s.sum(1)


class Flow(nn.Module):
    def __init__(self, steps=4):
        super().__init__()
        layers = []
        for i in range(steps):
            layers += [ActNorm(DIM), Coupling(DIM, flip=bool(i % 2))]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        prior = -0.5 * (x ** 2).sum(1) - 0.5 * DIM * math.log(2 * math.pi)
        return prior + logdet


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
dataset = TensorDataset(sensor_table())
sampler = DistributedSampler(dataset, seed=42)
loader = DataLoader(dataset, batch_size=40, sampler=sampler)
flow = DistributedDataParallel(Flow())
opt = torch.optim.Adam(flow.parameters(), lr=2e-3)

for epoch in range(3):
    sampler.set_epoch(epoch)
    nll_sum = torch.zeros(())
    for (x,) in loader:
        loss = -flow(x).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        opt.step()
        nll_sum += loss.detach()
    dist.all_reduce(nll_sum)
    if rank == 0:
        print(f"epoch {epoch}  nll {nll_sum.item() / (len(loader) * world):.3f}")

if rank == 0:
    torch.save(flow.module.state_dict(), "flow.pt")
dist.barrier()
dist.destroy_process_group()
