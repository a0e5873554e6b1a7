"""Local SGD: every rank takes eight steps alone, then the weights are averaged."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
PERIOD = 8


def power_load(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 14, generator=g)
    y = (x[:, :3].sum(1) + torch.sin(2 * x[:, 3]) + 0.2 * torch.randn(n, generator=g))[:, None]
    return TensorDataset(x, y)


@torch.no_grad()
def average(tensors):
    world = dist.get_world_size()
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    flat /= world
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 1))
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    train, val = power_load(2048, 1), power_load(256, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    steps = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
            if steps % PERIOD == 0:
                average(list(net.parameters()))
        average(list(net.parameters()))          # all alike before the evaluation
        with torch.no_grad():
            x, y = val[rank::world]
            se = (net(x) - y).square().sum()
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch} val mse {se.item() / len(val):.4f}", flush=True)
            torch.save(net.state_dict(), "local_sgd.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
