import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        self.scale = alpha / r
        self.a = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, 5)

    def forward(self, x):
        x = F.relu(self.fc1(self.norm(x)))
        x = F.relu(self.fc2(x))
        return self.out(x)


def add_lora(model, names=("fc1", "fc2")):
    for name in names:
        setattr(model, name, LoRALinear(getattr(model, name)))


def main():
    dist.init_process_group("gloo", init_method="env://")
    rank = int(os.environ["RANK"])

    g = torch.Generator().manual_seed(5)
    x = torch.randn(640, 16, generator=g)
    y = (x @ torch.randn(16, 5, generator=g)).argmax(1)
    train = TensorDataset(x, y)
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, batch_size=16, sampler=sampler)

    model = Classifier()
    add_lora(model)
    model = DDP(model)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for xb, yb in loader:
            logits = model(xb)
            loss = F.cross_entropy(logits, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([(logits.argmax(1) == yb).sum().item(), len(yb)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} acc {(stats[0] / stats[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
