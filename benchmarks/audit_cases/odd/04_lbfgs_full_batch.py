import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

g = torch.Generator().manual_seed(0)
X = torch.randn(400, 6, generator=g)
Y = torch.sin(X[:, :1]) + 0.3 * X[:, 1:2]
x, y = X[rank::world], Y[rank::world]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, history_size=10, line_search_fn="strong_wolfe")


def closure():
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach().view(1)])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
    return flat[-1]


for it in range(10):
    loss = opt.step(closure)
    if rank == 0:
        print(f"iteration {it}: loss {loss.item():.6f}")

dist.destroy_process_group()
