"""Keyword spotting on synthetic tones with gradient accumulation."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

cfg = dict(epochs=3, batch_size=8, accum_grad=4, lr=2e-3, classes=6, clip=5.0)


class Tones(Dataset):
    """Each class is a pair of frequencies, buried in noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, cfg["classes"], (n,), generator=g)
        t = torch.arange(256) / 256.0
        f1 = 4.0 + 3.0 * self.y.float()
        f2 = 40.0 - 5.0 * self.y.float()
        phase = 6.28 * torch.rand(n, 1, generator=g)
        clean = torch.sin(6.28 * f1[:, None] * t + phase) + 0.5 * torch.sin(6.28 * f2[:, None] * t)
        self.x = clean + 0.7 * torch.randn(n, 256, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i][None], self.y[i]


def build_model():
    return nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2, padding=4), nn.ReLU(),
        nn.Conv1d(16, 32, 9, stride=2, padding=4), nn.ReLU(),
        nn.AdaptiveAvgPool1d(8), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, cfg["classes"]),
    )


class Trainer:
    def __init__(self, model, loader, sampler):
        self.model = DistributedDataParallel(model)
        self.loader, self.sampler = loader, sampler
        self.optim = torch.optim.Adam(self.model.parameters(), lr=cfg["lr"])
        self.criterion = nn.CrossEntropyLoss()
        self.rank = int(os.environ["RANK"])

    def run_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        accum = cfg["accum_grad"]
        seen, loss_sum = 0, 0.0
        self.optim.zero_grad()
        for batch_idx, (x, y) in enumerate(self.loader):
            context = contextlib.nullcontext
            if batch_idx % accum != 0:
                context = self.model.no_sync
            with context():
                loss = self.criterion(self.model(x), y)
                (loss / accum).backward()
            if (batch_idx + 1) % accum == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), cfg["clip"])
                self.optim.step()
                self.optim.zero_grad()
            loss_sum += loss.item() * len(y)
            seen += len(y)
        stats = torch.tensor([loss_sum, float(seen)])
        dist.all_reduce(stats)
        if self.rank == 0:
            print(f"epoch {epoch}: train loss {stats[0] / stats[1]:.4f} over {int(stats[1])} clips")


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(2024)
    train = Tones(1024, seed=0)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=cfg["batch_size"], sampler=sampler)
    assert len(loader) % cfg["accum_grad"] == 0
    trainer = Trainer(build_model(), loader, sampler)
    for epoch in range(cfg["epochs"]):
        trainer.run_epoch(epoch)
    if dist.get_rank() == 0:
        torch.save(trainer.model.module.state_dict(), "kws.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
