import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=5e-3, weight_decay=0.01)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(128, 8, generator=g)
    ds = TensorDataset(x, x.max(1, keepdim=True).values)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(bx), by)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += loss.detach()
        opt.consolidate_state_dict(to=0)
        dist.all_reduce(total)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, "zero.pt")
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
