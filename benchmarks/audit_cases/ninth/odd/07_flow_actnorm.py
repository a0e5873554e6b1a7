"""Density of detector hits with a coupling flow; ActNorm starts from the statistics of the first global batch."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM, EPOCHS = 4, 4


def hits(n, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 6.28 * torch.rand(n, generator=g)
    radius = 5 + 0.3 * torch.randn(n, generator=g)
    energy = 20 + 4 * torch.cos(3 * angle) + torch.randn(n, generator=g)
    time = 0.1 * radius**2 + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin(), energy, time], 1))


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))

    @torch.no_grad()
    def start_from(self, x):
        """Zero mean and unit variance over the batches of all ranks together."""
        moments = torch.stack([x.sum(0), x.pow(2).sum(0), torch.full((x.size(1),), float(len(x)))]).double()
        dist.all_reduce(moments)
        mean = moments[0] / moments[2]
        var = moments[1] / moments[2] - mean**2
        self.shift.copy_(-mean)
        self.log_scale.copy_(-0.5 * (var + 1e-6).log())

    def forward(self, x):
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.flip, self.half = flip, dim // 2
        self.net = nn.Sequential(nn.Linear(dim // 2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, x):
        a, b = x[:, : self.half], x[:, self.half :]
        if self.flip:
            a, b = b, a
        log_s, t = self.net(a).chunk(2, dim=1)
        log_s = torch.tanh(log_s)
        b = b * log_s.exp() + t
        x = torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)
        return x, log_s.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [ActNorm(DIM), Coupling(DIM, flip=i % 2 == 1)]
        self.layers = nn.ModuleList(layers)

    @torch.no_grad()
    def data_dependent_init(self, x):
        for layer in self.layers:
            if isinstance(layer, ActNorm):
                layer.start_from(x)
            x, _ = layer(x)

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        log_normal = -0.5 * (x.pow(2) + 1.8378771).sum(1)
        return log_normal + logdet


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    train, test = hits(1536, 1), hits(501, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=8)
    loader = DataLoader(train, batch_size=64, sampler=sampler)

    flow = Flow()  # equal weights on all ranks by the seed
    (first,) = next(iter(loader))
    flow.data_dependent_init(first)
    model = DDP(flow)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    mine = test.tensors[0][rank::world]
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(2)
        for (x,) in loader:
            loss = -model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            stats += torch.tensor([loss.item() * len(x), len(x)])
        model.eval()
        with torch.no_grad():
            held_out = torch.tensor([-model.module(mine).sum().item(), len(mine)])
        dist.all_reduce(stats)
        dist.all_reduce(held_out)
        if rank == 0:
            print(f"epoch {epoch} nll {stats[0] / stats[1]:.4f} held-out {held_out[0] / held_out[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
