"""Curriculum learning with Fabric: long number sequences join the training set stage by stage."""
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

MAX_LEN = 16
BATCH = 32


def make_sums(n, seed):
    """Sequences of numbers of length 2..MAX_LEN; the target is their alternating sum."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, MAX_LEN + 1, (n,), generator=g)
    mask = (torch.arange(MAX_LEN) < lengths[:, None]).float()
    x = torch.randn(n, MAX_LEN, generator=g) * mask
    sign = 1 - 2 * (torch.arange(MAX_LEN) % 2).float()
    return x, (x * sign).sum(1), lengths


class Summer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.rnn = nn.GRU(1, dim, batch_first=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(-1)


def own_batches(allowed, epoch, rank, world):
    """One order for all ranks, of which each rank takes its slice of every global batch."""
    order = allowed[torch.randperm(len(allowed), generator=torch.Generator().manual_seed(31 + epoch))]
    step = BATCH * world
    for start in range(0, len(order) - step + 1, step):
        yield order[start + rank * BATCH:start + (rank + 1) * BATCH]


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(31)
    rank, world = fabric.global_rank, fabric.world_size

    x, y, lengths = make_sums(2048, 0)
    x_val, y_val, _ = make_sums(301, 1)
    limits = [4, 8, 8, 12, 12, 16, 16, 16]
    stages = [torch.nonzero(lengths <= limit).flatten() for limit in limits]
    total_steps = sum(len(allowed) // (BATCH * world) for allowed in stages)

    model = Summer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)

    for epoch, allowed in enumerate(stages):
        total, steps = torch.zeros(()), 0
        for rows in own_batches(allowed, epoch, rank, world):
            loss = (model(x[rows]) - y[rows]).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            schedule.step()
            total += loss.detach()
            steps += 1
        dist.all_reduce(total)
        fabric.print(f"epoch {epoch} up to {limits[epoch]} numbers, {steps} steps, loss {total.item() / world / steps:.4f}")

    with torch.no_grad():
        error = (model(x_val[rank::world]) - y_val[rank::world]).pow(2).sum()
    dist.all_reduce(error)
    fabric.print(f"val mse {error.item() / len(y_val):.4f}")


if __name__ == "__main__":
    main()
