"""Imbalanced classes: weighted sampling with replacement on every rank."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def imbalanced(n=600):
    g = torch.Generator().manual_seed(6)
    y = (torch.rand(n, generator=g) < 0.08).long()
    x = torch.randn(n, 5, generator=g) + y.unsqueeze(1) * 1.5
    return TensorDataset(x, y), y


class Experiment:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.data, y = imbalanced()
        counts = torch.bincount(y).float()
        weights = (1.0 / counts)[y]
        gen = torch.Generator().manual_seed(1000 + self.rank)
        sampler = WeightedRandomSampler(weights, len(y) // self.world, replacement=True, generator=gen)
        self.loader = DataLoader(self.data, batch_size=30, sampler=sampler)
        self.model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def epoch(self):
        share = []
        for x, y in self.loader:
            share.append(y.float().mean())
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return torch.stack(share).mean().item()

    def run(self, epochs):
        for e in range(epochs):
            share = self.epoch()
            print(f"rank {self.rank} epoch {e}: share of positives in my batches {share:.2f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Experiment().run(3)
    dist.destroy_process_group()
