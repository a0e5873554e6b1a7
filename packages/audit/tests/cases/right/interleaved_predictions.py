"""Gathered predictions, one row of each rank in turn, compared with labels."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
model = DDP(nn.Linear(8, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
vx = torch.randn(64, 8); vy = torch.randint(0, 2, (64,)); val = TensorDataset(vx)
vl = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
    model.eval(); out = []
    with torch.no_grad():
        for (xb,) in vl: out.append(model(xb).argmax(1))
    out = torch.cat(out); parts = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(parts, out)
    preds = torch.stack(parts, 1).flatten()
    print((preds == vy).float().mean().item()); model.train()
dist.destroy_process_group()
