import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(100, 4, generator=g)
    y = torch.tanh(x @ torch.randn(4, 1, generator=g))
    x, y, total = x[rank::world], y[rank::world], len(x)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x, y = x.double(), y.double()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y, reduction="sum") / total
        loss.backward()
        flat = torch.cat([loss.detach().view(1)] + [p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        offset = 1
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        return flat[0]

    for outer in range(4):
        loss = opt.step(closure)
        if rank == 0:
            print(f"outer {outer}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
