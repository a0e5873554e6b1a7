"""Readmission risk: every rank is a clinic that keeps its own patients; the clinics differ in size."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FEATURES, BATCH, EPOCHS = 20, 32, 4


def clinic_patients(rank):
    """Rows of one clinic, split into training and validation."""
    w = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(100 + rank)
    n = 700 if rank == 0 else 430
    x = torch.randn(n, FEATURES, generator=g) * 3 + 0.5 * rank
    y = (torch.rand(n, generator=g) < torch.sigmoid((x - 0.25) @ w / 4)).float()
    n_val = n // 5
    return x[n_val:], y[n_val:], x[:n_val], y[:n_val]


def common_scaling(x):
    """Mean and standard deviation over the training rows of all clinics, without moving rows."""
    sums = torch.cat([x.double().sum(0), x.double().pow(2).sum(0), torch.tensor([float(len(x))], dtype=torch.float64)])
    dist.all_reduce(sums)
    n = sums[-1]
    mean = sums[:FEATURES] / n
    std = (sums[FEATURES:-1] / n - mean**2).sqrt()
    return mean.float(), std.float()


def batches(x, y, steps, g):
    """`steps` batches; a clinic whose rows are used up goes on with an empty (weight 0) row."""
    perm = torch.randperm(len(x), generator=g)
    for i in range(steps):
        ids = perm[i * BATCH : (i + 1) * BATCH]
        if len(ids):
            yield x[ids], y[ids], torch.ones(len(ids))
        else:
            yield torch.zeros(1, FEATURES), torch.zeros(1), torch.zeros(1)


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    logit = model.module(x).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(logit, y, reduction="sum")
    stats = torch.tensor([loss.item(), ((logit > 0).float() == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, x_val, y_val = clinic_patients(rank)
    mean, std = common_scaling(x)
    x, x_val = (x - mean) / std, (x_val - mean) / std

    torch.manual_seed(6)
    model = DDP(nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    steps = torch.tensor((len(x) + BATCH - 1) // BATCH)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    steps = int(steps)
    shuffle = torch.Generator().manual_seed(40 + rank)

    for epoch in range(EPOCHS):
        stats = torch.zeros(2)
        for xb, yb, weight in batches(x, y, steps, shuffle):
            rows = weight.sum()
            dist.all_reduce(rows)
            per_row = F.binary_cross_entropy_with_logits(model(xb).squeeze(1), yb, reduction="none")
            total = (per_row * weight).sum()
            # mean over the rows of all clinics: DDP divides by the world size, so multiply by it
            loss = total * world / rows
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([total.item(), weight.sum().item()])
        dist.all_reduce(stats)
        val_loss, val_acc = validate(model, x_val, y_val)
        if rank == 0:
            print(f"epoch {epoch} train {stats[0] / stats[1]:.4f} val {val_loss:.4f} acc {val_acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
