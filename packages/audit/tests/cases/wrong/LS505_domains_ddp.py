"""Sentiment over several domains; the validation loss of each domain is tracked separately."""
import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)
NAMES = ["books", "dvd", "kitchen", "phones"]
NOISE = {"books": 0.05, "dvd": 0.15, "kitchen": 0.25, "phones": 0.4}


class Domains(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.dom = torch.randint(0, 4, (n,), generator=g)
        self.x = torch.randn(n, 16, generator=g)
        self.y = (self.x[:, :4].sum(1) > 0).float()
        for i in range(n):
            if torch.rand((), generator=g) < NOISE[NAMES[self.dom[i]]]:
                self.y[i] = 1 - self.y[i]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], NAMES[self.dom[i]]


class Meter:
    def __init__(self):
        self.sums = defaultdict(lambda: torch.zeros(2))

    def update(self, name, value):
        self.sums[name] += torch.tensor([value, 1.0])

    def synchronize(self):
        for name, total in self.sums.items():
            dist.all_reduce(total)

    def averages(self):
        return {k: (v[0] / v[1]).item() for k, v in self.sums.items()}


class Trainer:
    def __init__(self, epochs=2):
        self.rank = int(os.environ["RANK"])
        self.epochs = epochs
        self.model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
        self.opt = optim.AdamW(self.model.parameters(), lr=5e-3)
        self.train_set, self.val_set = Domains(320, 0), Domains(120, 1)
        self.sampler = DistributedSampler(self.train_set)
        self.train_loader = DataLoader(self.train_set, batch_size=16, sampler=self.sampler)
        self.val_loader = DataLoader(self.val_set, batch_size=12, sampler=DistributedSampler(self.val_set, shuffle=False))

    def validate(self):
        meter = Meter()
        self.model.eval()
        with torch.no_grad():
            for x, y, names in self.val_loader:
                losses = nn.functional.binary_cross_entropy_with_logits(self.model(x), y, reduction="none")
                for name, value in zip(names, losses.tolist()):
                    meter.update(name, value)
        meter.synchronize()
        return meter.averages()

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y, _ in self.train_loader:
                self.opt.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(self.model(x), y).backward()
                self.opt.step()
            result = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch} " + " ".join(f"{k}={result[k]:.4f}" for k in sorted(result)), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(15)
    Trainer().fit()
    dist.destroy_process_group()
