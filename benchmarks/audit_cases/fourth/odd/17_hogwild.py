"""Hogwild inside each rank (two forked workers on shared weights), averaging between the ranks after each epoch."""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

torch.set_num_threads(1)


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return x, (x @ torch.linspace(-1, 1, 10) + 0.5 * x[:, 0] * x[:, 1])[:, None]


def build():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


def worker(i, net, x, y, epoch):
    torch.set_num_threads(1)
    opt = torch.optim.SGD(net.parameters(), lr=0.03)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * epoch + i))
    for idx in order.split(16):
        opt.zero_grad()
        nn.functional.mse_loss(net(x[idx]), y[idx]).backward()
        opt.step()                                # writes to shared memory without a lock


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = build()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    net.share_memory()
    x, y = rows(1024, 1)
    vx, vy = rows(200, 2)
    shards = [(x[k::2 * world], y[k::2 * world]) for k in range(2 * world)]
    ctx = mp.get_context("fork")
    for epoch in range(3):
        procs = [ctx.Process(target=worker, args=(i, net, *shards[2 * rank + i], epoch)) for i in range(2)]
        for p in procs:
            p.start()
        for p in procs:
            p.join()
            assert p.exitcode == 0
        with torch.no_grad():
            for p in net.parameters():
                dist.all_reduce(p.data)
                p.data /= world
            se = (net(vx[rank::world]) - vy[rank::world]).square().sum()
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch} val mse {se.item() / len(vy):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
