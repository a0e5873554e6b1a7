"""Sensor drift regression; gradients travel in half precision."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def half_precision(group, bucket):
    full = bucket.buffer()
    work = dist.all_reduce(full.to(torch.float16), group=group, async_op=True)

    def unpack(fut):
        return full.copy_(fut.value()[0])

    return work.get_future().then(unpack)


def readings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    drift = torch.cos(x[:, 0]) + 0.5 * x[:, 1] - 0.3 * x[:, 2] ** 2
    return x, drift[:, None] + 0.2 * torch.randn(n, 1, generator=g)


class DriftNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(20, 40)
        self.mid = nn.Linear(40, 40)
        self.out = nn.Linear(40, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(h + torch.relu(self.mid(h)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    x, y = readings(1000, 1)
    vx, vy = readings(200, 2)
    ddp = DDP(DriftNet())
    ddp.register_comm_hook(dist.group.WORLD, half_precision)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(3):
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        for part in perm.split(50):
            loss = nn.functional.mse_loss(ddp(x[part]), y[part])
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
        with torch.no_grad():
            se = (ddp.module(vx[rank::world]) - vy[rank::world]).square().sum()
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch}: val mse {se.item() / len(vx):.5f}", flush=True)
    print(f"[{rank}] weights {sum(p.double().abs().sum().item() for p in ddp.parameters()):.6f}", flush=True)
    dist.destroy_process_group()
