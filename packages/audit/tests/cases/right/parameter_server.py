"""Parameter server: rank 0 holds weights and optimizer and evaluates, the other ranks fetch weights and push gradients."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.set_num_threads(1)
STEPS = 90


def build():
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


def sample(n, gen):
    x = torch.rand(n, 6, generator=gen) * 2 - 1
    return x, (x[:, :1] * x[:, 1:2] * 3 + torch.cos(3 * x[:, 2:3]))


def serve(workers):
    torch.manual_seed(0)
    net = build()
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    test = sample(500, torch.Generator().manual_seed(1))
    left = {w: STEPS for w in workers}
    served = 0
    for w in workers:
        dist.send(parameters_to_vector(net.parameters()).detach(), dst=w)
    size = sum(p.numel() for p in net.parameters())
    while left:
        for w in list(left):
            grad = torch.empty(size)
            dist.recv(grad, src=w)
            at = 0
            for p in net.parameters():
                p.grad = grad[at:at + p.numel()].view_as(p).clone()
                at += p.numel()
            opt.step()
            served += 1
            left[w] -= 1
            if left[w]:
                dist.send(parameters_to_vector(net.parameters()).detach(), dst=w)
            else:
                del left[w]
        if served % 30 == 0:
            with torch.no_grad():
                print(f"update {served}: test mse {(net(test[0]) - test[1]).square().mean().item():.4f}", flush=True)
    torch.save(net.state_dict(), "server.pt")


def work(rank):
    net = build()
    gen = torch.Generator().manual_seed(100 + rank)
    weights = torch.empty(sum(p.numel() for p in net.parameters()))
    for _ in range(STEPS):
        dist.recv(weights, src=0)
        vector_to_parameters(weights, net.parameters())
        x, y = sample(64, gen)
        net.zero_grad()
        (net(x) - y).square().mean().backward()
        dist.send(torch.cat([p.grad.flatten() for p in net.parameters()]), dst=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        serve(list(range(1, dist.get_world_size())))
    else:
        work(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
