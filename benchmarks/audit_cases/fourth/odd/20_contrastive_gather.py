"""SimCLR-like pretraining on short waves: negatives from both ranks through a gather with gradients, then a probe."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.n = len(z)
        out = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(out, z.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        at = ctx.n * dist.get_rank()
        return grad[at:at + ctx.n]


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 6.283, 32)
    return torch.sin((1 + y[:, None]) * t + 6.283 * torch.rand(n, 1, generator=g)), y


def augment(x):
    return torch.roll(x, int(torch.randint(0, 32, ())), 1) * (0.7 + 0.6 * torch.rand(len(x), 1)) + 0.2 * torch.randn_like(x)


def nt_xent(a, b, tau=0.3):
    z = F.normalize(torch.cat([a, b]), dim=1)
    every = Gather.apply(z)
    n, off = len(a), len(z) * dist.get_rank()
    sim = z @ every.T / tau
    row = torch.arange(len(z))
    sim = sim.masked_fill(F.one_hot(row + off, len(every)).bool(), float("-inf"))
    return F.cross_entropy(sim, (row + n) % len(z) + off)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90 + rank)
    x, y = waves(640, 1)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        for idx in mine.split(64):
            views = model(torch.cat([augment(x[idx]), augment(x[idx])]))
            loss = nt_xent(*views.chunk(2))
            opt.zero_grad()
            loss.backward()
            opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world:.4f}", flush=True)
    if rank == 0:                                 # nearest-neighbour probe, no communication in it
        with torch.no_grad():
            z = F.normalize(net(x), dim=1)
            s = (z @ z.T).fill_diagonal_(-1)
            print(f"neighbours agree {(y[s.argmax(1)] == y).float().mean().item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
