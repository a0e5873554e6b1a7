import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

# Hybrid sharding: the model is sharded inside a node and replicated between nodes.
# With two processes: two "nodes" of one process.


class Simulator(IterableDataset):
    """Draws new samples for ever; every rank has its own stream."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            x = torch.randn(9, generator=g)
            yield x, (x[:3].sum() - x[3:6].prod()).unsqueeze(0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.2, total_iters=20)

    loader = DataLoader(Simulator(1000 + rank), batch_size=32)
    running = torch.zeros(1)
    for step, (x, y) in enumerate(loader, 1):
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        running += loss.detach()
        if step % 25 == 0:
            dist.all_reduce(running)
            if rank == 0:
                print(f"step {step} mse {running.item() / 25 / world:.4f}")
            running.zero_()
        if step == 75:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
