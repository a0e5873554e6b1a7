import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedWeightedSampler(Sampler):
    """Draws with replacement; all ranks draw the same list and take every n-th element of it."""

    def __init__(self, weights, num_samples, rank, world, seed=0):
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        self.rank, self.world, self.seed = rank, world, seed
        self.per_rank = math.ceil(num_samples / world)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.per_rank

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        draw = torch.multinomial(self.weights, self.per_rank * self.world, replacement=True, generator=g)
        return iter(draw[self.rank :: self.world].tolist())


def imbalanced(n=900):
    g = torch.Generator().manual_seed(1)
    y = torch.multinomial(torch.tensor([0.85, 0.1, 0.05]), n, replacement=True, generator=g)
    x = torch.randn(n, 6, generator=g) + 1.5 * F.one_hot(y, 6)
    return x, y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = imbalanced()
    weights = 1.0 / torch.bincount(y)[y]
    sampler = DistributedWeightedSampler(weights, 640, rank, world)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for xb, yb in loader:
            logits = model(xb)
            loss = F.cross_entropy(logits, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.tensor([(logits.argmax(1) == yb).sum().item(), len(yb)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch} balanced accuracy {(hits[0] / hits[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
