"""Ensemble: one member per process, gathered predictions averaged on rank 0."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

LRS = [0.01, 0.003]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(448, 5, generator=g)
    y = x.sin().sum(1, keepdim=True)
    torch.manual_seed(rank)
    member = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(member.parameters(), lr=LRS[rank % len(LRS)])
    loader = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=32, shuffle=True)
    for epoch in range(4):
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.mse_loss(member(xb), yb).backward()
            opt.step()
    with torch.no_grad():
        pred = member(x[384:])
    parts = [torch.zeros_like(pred) for _ in range(world)] if rank == 0 else None
    dist.gather(pred, parts, dst=0)
    torch.save(member.state_dict(), f"member{rank}.pt")
    if rank == 0:
        for i, p in enumerate(parts):
            print(f"member {i}: {nn.functional.mse_loss(p, y[384:]).item():.4f}")
        print(f"ensemble: {nn.functional.mse_loss(torch.stack(parts).mean(0), y[384:]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
