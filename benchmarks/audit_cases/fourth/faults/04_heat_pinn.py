"""Physics-informed network for the 1-d heat equation u_t = a u_xx, u(x,0)=sin(pi x), u(0,t)=u(1,t)=0."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
A = 0.1
N_IN, N_BC = 48, 16


class Net(nn.Module):
    def __init__(self, w=24):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1))

    def forward(self, xt):
        return self.f(xt)


def draw():
    inner = torch.rand(N_IN, 2)
    start = torch.stack([torch.rand(N_BC), torch.zeros(N_BC)], 1)
    side = torch.stack([torch.randint(0, 2, (N_BC,)).float(), torch.rand(N_BC)], 1)
    return inner, start, side


def residual_loss(net):
    inner, start, side = draw()
    pts = torch.cat([inner, start, side]).requires_grad_(True)
    u = net(pts)
    g = torch.autograd.grad(u.sum(), pts, create_graph=True)[0]
    u_xx = torch.autograd.grad(g[:, 0].sum(), pts, create_graph=True)[0][:, 0]
    pde = (g[:N_IN, 1] - A * u_xx[:N_IN]).square().mean()
    ic = (u[N_IN:N_IN + N_BC, 0] - torch.sin(math.pi * start[:, 0])).square().mean()
    bc = u[N_IN + N_BC:].square().mean()
    return pde + 5 * ic + 5 * bc, inner


def error(net):
    x, t = torch.meshgrid(torch.linspace(0, 1, 41), torch.linspace(0, 1, 21), indexing="ij")
    exact = torch.exp(-A * math.pi ** 2 * t) * torch.sin(math.pi * x)
    with torch.no_grad():
        u = net(torch.stack([x.flatten(), t.flatten()], 1)).view_as(exact)
    return ((u - exact).norm() / exact.norm()).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    net = DDP(Net())
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    spread = torch.zeros(2)
    for it in range(1, 241):
        loss, inner = residual_loss(net)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        spread += inner[0].detach()
        if it % 80 == 0 and rank == 0:
            print(f"it {it} loss {mean.item() / dist.get_world_size():.5f} rel.err {error(net.module):.4f}", flush=True)
    print(f"[{rank}] first points {spread.tolist()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
