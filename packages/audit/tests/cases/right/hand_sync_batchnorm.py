import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn


class CrossRankNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    def forward(self, x):
        if self.training:
            stats = torch.cat([x.mean(0), x.square().mean(0)])
            mean, square = (dnn.all_reduce(stats) / dist.get_world_size()).chunk(2)
            var = square - mean.square()
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var, 0.1)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * (var + 1e-5).rsqrt() * self.weight + self.bias


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), CrossRankNorm(32), nn.ReLU(), nn.Linear(32, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(448, 8, generator=torch.Generator().manual_seed(3))
    y = (x.sum(1) > 0).long()
    for epoch in range(3):
        order = torch.randperm(448, generator=torch.Generator().manual_seed(epoch))[rank::world]
        for idx in order.split(16):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(world)
            opt.step()
    print(f"rank {rank} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
