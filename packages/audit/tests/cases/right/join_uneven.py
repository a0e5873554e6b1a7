import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 16


def shard(rank):
    # what the ingestion job left on this node: not the same amount everywhere
    n = 176 if rank == 0 else 128
    g = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(n, 9, generator=g)
    return x, x.abs().sum(1, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, y = shard(rank)
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch * 10 + rank))
        steps = 0
        with Join([model]):
            for idx in order.split(BATCH):
                opt.zero_grad()
                loss = nn.functional.mse_loss(model(x[idx]), y[idx])
                loss.backward()
                opt.step()
                steps += 1
        print(f"rank {rank} epoch {epoch}: {steps} steps, last loss {loss.item():.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
