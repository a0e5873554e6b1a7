"""Uneven data in a join, and an optimizer with a state."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
n = 128 if rank == 0 else 80
x = torch.randn(n, 8); y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(rank))
model = DDP(nn.Linear(8, 2)); opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    with model.join():
        for xb, yb in loader:
            opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
dist.destroy_process_group()
