"""Deep ensemble for uncertainty: every process trains its own member on the whole training set, from its own
initial weights and in its own order; only the predictions are combined."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 15


def toy(n, seed, low=-3.0, high=3.0):
    g = torch.Generator().manual_seed(seed)
    x = low + (high - low) * torch.rand(n, 1, generator=g)
    return x, torch.sin(x) + 0.1 * (1 + x.abs()) * torch.randn(n, 1, generator=g)


class Member(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mu, self.raw_var = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mu(h), nn.functional.softplus(self.raw_var(h)) + 1e-4


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = toy(600, seed=0)
    x_test, y_test = toy(201, seed=1, low=-4, high=4)

    torch.manual_seed(1000 + rank)
    member = Member()
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(member.parameters(), lr=5e-3)
    nll = nn.GaussianNLLLoss()

    for epoch in range(EPOCHS):
        for xb, yb in loader:
            mu, var = member(xb)
            loss = nll(mu, yb, var)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(member.state_dict(), f"member_{rank}.pt")

    member.eval()
    with torch.no_grad():
        mu, var = member(x_test)
    own_rmse = (mu - y_test).pow(2).mean().sqrt().item()

    moments = torch.stack([mu, var + mu ** 2])
    dist.all_reduce(moments)
    mean, second = moments / world
    variance = second - mean ** 2
    rmse = (mean - y_test).pow(2).mean().sqrt().item()
    score = 0.5 * (torch.log(2 * math.pi * variance) + (y_test - mean) ** 2 / variance).mean().item()

    print(f"member {rank}: rmse {own_rmse:.4f}", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"ensemble of {world}: rmse {rmse:.4f}, nll {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
