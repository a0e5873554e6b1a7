import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class CurriculumSampler(Sampler):
    """Draws from the easiest share of the data; the share grows from 40% to 100%."""

    def __init__(self, difficulty, rank, world, epochs, seed=0):
        self.order = difficulty.argsort()
        self.rank, self.world, self.epochs, self.seed = rank, world, epochs, seed
        self.epoch = 0

    def _count(self):
        share = min(1.0, 0.4 + 0.6 * self.epoch / max(1, self.epochs - 1))
        return math.floor(share * len(self.order) / self.world) * self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        pool = self.order[: self._count()]
        perm = pool[torch.randperm(len(pool), generator=g)]
        return iter(perm[self.rank :: self.world].tolist())

    def __len__(self):
        return self._count() // self.world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(77)
    x = torch.randn(500, 8, generator=g)
    margin = x[:, 0] + x[:, 1]
    data = TensorDataset(x, (margin > 0).long())
    epochs = 4
    sampler = CurriculumSampler(-margin.abs(), rank, world, epochs)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        sampler.epoch = epoch
        loader = DataLoader(data, batch_size=16, sampler=sampler)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {len(sampler)} samples per rank in {len(loader)} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
