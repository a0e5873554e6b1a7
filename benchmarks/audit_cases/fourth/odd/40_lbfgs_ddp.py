"""Full-batch L-BFGS on shards of the data; loss and gradient are averaged by hand inside the closure."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

torch.set_num_threads(1)


def make_problem(n=400):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=g) * 4 - 2
    return x, torch.sin(x[:, :1]) * x[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)

    x, y = make_problem()
    train_x, train_y = x[:320][rank::world], y[:320][rank::world]
    test_x, test_y = x[320:][rank::world], y[320:][rank::world]
    opt = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=8, history_size=10, line_search_fn="strong_wolfe")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(train_x), train_y)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()] + [loss.detach().reshape(1)])
        dist.all_reduce(flat)
        flat /= world
        at = 0
        for p in net.parameters():
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        return flat[-1]

    for it in range(8):
        loss = opt.step(closure)
        with torch.no_grad():
            err = nn.functional.mse_loss(net(test_x), test_y)
        dist.all_reduce(err)
        if rank == 0:
            print(f"iteration {it} train {loss.item():.6f} test {err.item() / world:.6f} closure calls {calls}", flush=True)
    print(f"rank {rank} |w| {parameters_to_vector(net.parameters()).norm().item():.7f}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
