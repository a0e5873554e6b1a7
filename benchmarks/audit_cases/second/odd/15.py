import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

STEPS, ECHO = 60, 2


class Forever(Sampler):
    """Endless stream of permutations, as in detectron2."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def stream(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()

    def __iter__(self):
        return itertools.islice(self.stream(), dist.get_rank(), None, dist.get_world_size())


def task(n, dim, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x @ torch.randn(8, dim, generator=g))


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.a, self.b = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, xa, xb):
        return self.a(self.body(xa)), self.b(self.body(xb))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    big, small = task(700, 1, 1), task(90, 3, 2)
    it_a = iter(DataLoader(big, batch_size=16, sampler=Forever(len(big), 10)))
    it_b = iter(DataLoader(small, batch_size=8, sampler=Forever(len(small), 20)))
    model = DDP(TwoTasks())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        (xa, ya), (xb, yb) = next(it_a), next(it_b)
        # reading is slow in this project, so each batch is used twice
        for _ in range(ECHO):
            pa, pb = model(xa, xb)
            loss = F.mse_loss(pa, ya) + F.mse_loss(pb, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if step % 20 == 19:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {value.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
