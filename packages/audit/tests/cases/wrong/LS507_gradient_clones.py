"""Clones of gradients are averaged."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward()
        for p in model.parameters():
            total = p.grad.detach().clone()
            dist.all_reduce(total)
            total /= world
        opt.step()
dist.destroy_process_group()
