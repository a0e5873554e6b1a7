"""Resumed in one process: the optimizer is not loaded, and a finished epoch is trained again."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
import os
def build():
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)
def train(first, last, resume):
    model, opt = build()
    sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
    if resume:
        state = torch.load("ckpt.pt")
        model.module.load_state_dict(state["model"])
        first = state["epoch"]
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
        if rank == 0: torch.save({"model": model.module.state_dict(), "epoch": epoch}, "ckpt.pt")
        dist.barrier()
train(0, 2, False)
train(0, 4, True)
dist.destroy_process_group()
