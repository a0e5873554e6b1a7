"""Sums of noisy digits, easy ones first: the pool grows with the epochs, so early epochs leave much data out."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.set_num_threads(1)


class Curriculum(Sampler):
    def __init__(self, difficulty, rank, world, start=0.25, epochs=4):
        self.order = difficulty.argsort(stable=True)
        self.rank, self.world, self.start, self.epochs, self.epoch = rank, world, start, epochs, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def pool(self):
        frac = self.start + (1 - self.start) * self.epoch / (self.epochs - 1)
        n = int(frac * len(self.order)) // self.world * self.world
        return self.order[:n]

    def __iter__(self):
        pool = self.pool()
        perm = torch.randperm(len(pool), generator=torch.Generator().manual_seed(self.epoch))
        return iter(pool[perm][self.rank::self.world].tolist())

    def __len__(self):
        return len(self.pool()) // self.world


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    digits = torch.randint(0, 10, (n, 3), generator=g)
    noise = torch.rand(n, generator=g)
    x = nn.functional.one_hot(digits, 10).flatten(1) + noise[:, None] * torch.randn(n, 30, generator=g)
    return x, digits.sum(1).float()[:, None], noise


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y, noise = make(2000, 1)
    vx, vy, _ = make(400, 2)
    sampler = Curriculum(noise, rank, world)
    loader = DataLoader(TensorDataset(x, y), batch_size=25, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for a, b in loader:
            opt.zero_grad()
            nn.functional.smooth_l1_loss(model(a), b).backward()
            opt.step()
        with torch.no_grad():
            err = (model.module(vx[rank::world]) - vy[rank::world]).abs().sum()
        dist.all_reduce(err)
        if rank == 0:
            print(f"epoch {epoch}: {len(sampler)} per rank, mean error {err.item() / len(vy):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
