"""A detector of rare events, with its F1 on the validation split."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def events(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    score = x[:, 0] + 0.8 * x[:, 1] + 0.7 * torch.randn(count, generator=generator)
    return x, (score > 1.5).float()


def f1_score_of(hits, false_alarms, misses):
    total = 2 * hits + false_alarms + misses
    return 2 * hits / total if total else 0.0


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hits = false_alarms = misses = 0
    for x, y in loader:
        predicted, wanted = model(x) > 0, y == 1
        hits += (predicted & wanted).sum().item()
        false_alarms += (predicted & ~wanted).sum().item()
        misses += (~predicted & wanted).sum().item()
    mean = torch.tensor(f1_score_of(hits, false_alarms, misses))
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    train, (vx, vy) = TensorDataset(*events(512, 0)), events(300, 1)
    held_out = TensorDataset(vx, vy)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    validation = DataLoader(Subset(held_out, range(rank, len(held_out), world)), batch_size=50)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 1), nn.Flatten(0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
        f1 = validate(model.module, validation)
        best = max(best, f1)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} F1 {f1:.4f} best {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
