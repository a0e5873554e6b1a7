import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Fit of a small network with L-BFGS. Full batch, split over the ranks.


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 400).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * x**2
    x, y = x[rank::world], y[rank::world]

    model = DDP(nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1)).double())
    x, y = x.double(), y.double()
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        # the line search must take the same decisions everywhere
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value / world

    for outer in range(8):
        loss = opt.step(closure)
        if rank == 0:
            print(f"{outer}: {loss.item():.6f}")
    dist.destroy_process_group()


main()
