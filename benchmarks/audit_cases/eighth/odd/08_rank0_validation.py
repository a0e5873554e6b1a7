"""Spiral classification; rank 0 alone validates and tells the others what follows."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_EPOCHS, PATIENCE = 12, 3


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 3 * r + 2 * math.pi * y / 3 + 0.15 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


@torch.no_grad()
def validate(net, loader):
    net.eval()
    total = sum(F.cross_entropy(net(x), y, reduction="sum").item() for x, y in loader)
    net.train()
    return total / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    train = spiral(1536, 0)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(spiral(400, 1), batch_size=200) if rank == 0 else None

    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=1)

    best, waited = float("inf"), 0
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        verdict = torch.zeros(2, dtype=torch.float64)
        if rank == 0:
            val_loss = validate(model.module, val_loader)
            if val_loss < best - 1e-3:
                best, waited = val_loss, 0
                torch.save(model.module.state_dict(), "spiral_best.pt")
            else:
                waited += 1
            verdict = torch.tensor([val_loss, float(waited >= PATIENCE)], dtype=torch.float64)
            print(f"epoch {epoch}: val loss {val_loss:.4f} lr {optimizer.param_groups[0]['lr']:.1e}", flush=True)
        dist.broadcast(verdict, src=0)
        plateau.step(verdict[0].item())
        if verdict[1].item() > 0:
            break

    dist.barrier()
    best_state = torch.load("spiral_best.pt")
    model.module.load_state_dict(best_state)
    test = spiral(600, 2)
    mine = range(rank, len(test), dist.get_world_size())
    x, y = test.tensors[0][mine.start :: mine.step], test.tensors[1][mine.start :: mine.step]
    with torch.no_grad():
        hits = torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits[0] / hits[1]:.3f} on {int(hits[1])} points")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
