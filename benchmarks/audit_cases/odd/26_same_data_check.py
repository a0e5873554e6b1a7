import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(480, 6, generator=g)
    y = x[:, :2].prod(1, keepdim=True)
    train = TensorDataset(x[:416], y[:416])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(TensorDataset(x[416:], y[416:]), batch_size=32)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(xb), yb).backward()
            opt.step()
        with torch.no_grad():
            val = sum(nn.functional.mse_loss(model.module(a), b, reduction="sum") for a, b in val_loader) / 64
        every = [torch.zeros_like(val) for _ in range(world)]
        dist.all_gather(every, val)
        spread = (max(every) - min(every)).item()
        assert spread < 1e-6, f"replicas differ by {spread}"
        if rank == 0:
            print(f"epoch {epoch} val {val.item():.4f}, the same on {world} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
