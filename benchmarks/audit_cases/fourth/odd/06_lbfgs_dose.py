"""Dose-response curves by L-BFGS over the whole data set; each rank holds a part of it."""
import torch
import torch.distributed as dist
import torch.nn as nn

torch.set_num_threads(1)


def assays(n, seed):
    g = torch.Generator().manual_seed(seed)
    dose = torch.rand(n, 1, generator=g) * 4 - 2
    other = torch.randn(n, 3, generator=g)
    y = torch.sigmoid(3 * dose + 0.5 * other[:, :1]) + 0.05 * torch.randn(n, 1, generator=g)
    return torch.cat([dose, other], 1), y


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 10)
        self.out = nn.Linear(10, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Curve()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    x, y = assays(601, 1)
    vx, vy = assays(200, 2)
    lo, hi = rank * len(x) // world, (rank + 1) * len(x) // world
    x_mine, y_mine, total = x[lo:hi], y[lo:hi], len(x)
    opt = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=6, line_search_fn="strong_wolfe")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = (model(x_mine) - y_mine).square().sum() / total
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        whole = loss.detach().clone()
        dist.all_reduce(whole)                   # the line search must see one loss on all ranks
        return whole

    for outer in range(8):
        loss = opt.step(closure)
        with torch.no_grad():
            val = (model(vx) - vy).square().mean().item()
        if rank == 0:
            print(f"outer {outer} loss {loss.item():.6f} val {val:.6f} calls {calls}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
