"""Churn prediction with a wide MLP split over two ranks by hand (columns, then rows).

Every rank reads the same rows; encoder and classifier are kept on both ranks.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


class SplitMLP(nn.Module):
    def __init__(self, dim, hidden, world):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden // world)
        self.down = nn.Linear(hidden // world, dim, bias=False)

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)))
        return x + SumOverRanks.apply(self.down(h))


class Churn(nn.Module):
    def __init__(self, rank, world, dim=24, hidden=128):
        super().__init__()
        self.encoder = nn.Linear(15, dim)
        self.classifier = nn.Linear(dim, 2)
        torch.manual_seed(1000 + rank)
        self.mlps = nn.ModuleList(SplitMLP(dim, hidden, world) for _ in range(2))

    def forward(self, x):
        x = self.encoder(x)
        for m in self.mlps:
            x = m(x)
        return self.classifier(x)


def customers(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 15, generator=g)
    y = ((x[:, 0] * x[:, 1] + x[:, 2] - x[:, 3].abs()) + 0.3 * torch.randn(n, generator=g) > 0).long()
    return x, y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Churn(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = customers(1280, 1)
    vx, vy = customers(400, 2)
    for epoch in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for idx in order.split(64):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            acc = (model(vx).argmax(1) == vy).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {acc:.4f}", flush=True)
    print(f"[{rank}] encoder {model.encoder.weight.double().abs().sum().item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
