"""Pretraining, then fine-tuning of the best weights with a new optimizer and the same loader."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
def stage(lr, epochs):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
        if rank == 0: torch.save({"model": model.module.state_dict(), "epoch": epoch}, "best.pt")
        dist.barrier()
stage(1e-2, 2)
model.module.load_state_dict(torch.load("best.pt")["model"])
stage(1e-4, 2)
dist.destroy_process_group()
