import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Simulator(IterableDataset):
    def __init__(self, seed, rank, world):
        self.seed, self.rank, self.world = seed, rank, world

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        first = self.rank * workers + worker
        for number in itertools.count(first, self.world * workers):
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            x = torch.rand(4, generator=g) * 6 - 3
            yield x, x.sin().sum(0, keepdim=True)


def main(max_steps=24):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = iter(DataLoader(Simulator(5, rank, world), batch_size=8, num_workers=1))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-2, total_steps=max_steps)
    for step in range(max_steps):
        x, y = next(loader)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 8 == 7:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: {mean.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
