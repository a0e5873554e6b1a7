"""Rare-defect detection on sensor readings; hand-written data parallelism."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

EPOCHS = 5
BATCH = 64


def readings(n, seed):
    """Lines are logged one after the other; the later ones run on worn machines."""
    g = torch.Generator().manual_seed(seed)
    wear = torch.linspace(0, 1, n)
    y = (torch.rand(n, generator=g) < 0.03 + 0.25 * wear**2).float()
    x = torch.randn(n, 12, generator=g)
    x[:, :4] += y.unsqueeze(1) * torch.tensor([1.2, -1.0, 0.8, 0.6])
    x[:, 4] += wear
    return x, y


def average_gradients(model, world):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for g in grads:
        g.copy_(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    model.eval()
    lo, hi = rank * len(x) // world, (rank + 1) * len(x) // world
    pred = (model(x[lo:hi]).squeeze(1) > 0).float()
    truth = y[lo:hi]
    tp = (pred * truth).sum()
    fp = (pred * (1 - truth)).sum()
    fn = ((1 - pred) * truth).sum()
    f1 = 2 * tp / (2 * tp + fp + fn).clamp(min=1)
    dist.all_reduce(f1)
    f1 /= world
    return f1.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)

    x_train, y_train = readings(4096, seed=0)
    x_val, y_val = readings(1500, seed=1)

    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    best = -1.0
    for epoch in range(EPOCHS):
        model.train()
        order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank::world]
        for start in range(0, len(mine), BATCH):
            idx = mine[start : start + BATCH]
            loss = F.binary_cross_entropy_with_logits(model(x_train[idx]).squeeze(1), y_train[idx], pos_weight=torch.tensor(2.0))
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
        f1 = evaluate(model, x_val, y_val, rank, world)
        if f1 > best:
            best = f1
            if rank == 0:
                torch.save(model.state_dict(), "best.pt")
        if rank == 0:
            print(f"epoch {epoch}: val F1 {f1:.4f} (best {best:.4f})")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
