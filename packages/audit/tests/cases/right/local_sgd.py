"""Local SGD with periodic parameter averaging."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


@torch.no_grad()
def average_parameters(model):
    world = dist.get_world_size()
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data.div_(world)


def local_batches(rank, world, n=640, batch=16, seed=0):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 10, generator=g)
    y = x[:, :5].sum(1, keepdim=True) * 0.5
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[rank::world]
    for chunk in order.split(batch):
        yield x[chunk], y[chunk]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--sync-every", type=int, default=5)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    step = 0
    for epoch in range(args.epochs):
        for x, y in local_batches(rank, world, seed=epoch):
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            step += 1
            if step % args.sync_every == 0:
                average_parameters(model)
        print(f"rank {rank} epoch {epoch} local loss {loss.item():.4f}")
    average_parameters(model)
    if rank == 0:
        torch.save(model.state_dict(), "local_sgd.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
