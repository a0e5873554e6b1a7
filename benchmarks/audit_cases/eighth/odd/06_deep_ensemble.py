"""Deep ensemble: every rank fits its own member, the predictions are pooled."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS = 6


def wave(n, seed, low=-3.0, high=3.0):
    g = torch.Generator().manual_seed(seed)
    x = low + (high - low) * torch.rand(n, 1, generator=g)
    return x, torch.sin(2 * x) + 0.3 * x + (0.05 + 0.1 * x.abs()) * torch.randn(n, 1, generator=g)


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, x):
        mean, raw = self.body(x).chunk(2, dim=-1)
        return mean, nn.functional.softplus(raw) + 1e-4


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # member = own initial weights and own bootstrap sample of the common data
    torch.manual_seed(200 + rank)
    member = Gaussian()
    optimizer = torch.optim.Adam(member.parameters(), lr=5e-3)
    nll = nn.GaussianNLLLoss()

    x, y = wave(1024, seed=0)
    boot = torch.randint(0, len(x), (len(x),), generator=torch.Generator().manual_seed(rank))
    data = TensorDataset(x[boot], y[boot])
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(500 + rank))
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    for epoch in range(EPOCHS):
        total = 0.0
        for bx, by in loader:
            mean, var = member(bx)
            loss = nll(mean, by, var)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(bx)
        print(f"member {rank} epoch {epoch}: nll {total / len(data):.4f}", flush=True)

    member.eval()
    x_test, y_test = wave(400, seed=1)
    with torch.no_grad():
        mean, var = member(x_test)
    moments = torch.stack([mean, var + mean**2])
    dist.all_reduce(moments)
    moments /= world
    mix_mean = moments[0]
    mix_var = moments[1] - mix_mean**2
    rmse = (mix_mean - y_test).pow(2).mean().sqrt().item()
    score = nll(mix_mean, y_test, mix_var).item()
    if rank == 0:
        print(f"ensemble of {world}: rmse {rmse:.4f} nll {score:.4f}")

    torch.save(member.state_dict(), f"member_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
