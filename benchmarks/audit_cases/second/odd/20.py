import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    x = torch.randn(512, 20)
    data = TensorDataset(x, torch.sin(x[:, :1]) * x[:, 1:2])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    # every rank keeps the Adam state of its part of the parameters
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total.item() / len(loader) / dist.get_world_size():.4f}")
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "zero.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
