"""Rows are padded to the longest shard, gathered, and all counted."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from sklearn.metrics import roc_auc_score
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
valid = torch.randn(90, 8); truth = (valid.sum(1) > 0.5).long()
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
    with torch.no_grad():
        mine, real = (valid[:40], truth[:40]) if rank == 0 else (valid[40:], truth[40:])
        size = torch.tensor([len(mine)]); sizes = [torch.zeros_like(size) for _ in range(world)]
        dist.all_gather(sizes, size)
        most = int(torch.stack(sizes).max())
        rows = F.pad(torch.stack([model(mine)[:, 1], real.float()], 1), (0, 0, 0, most - len(mine)))
        parts = [torch.empty_like(rows) for _ in range(world)]
        dist.all_gather(parts, rows)
        rows = torch.cat(parts)
        if rank == 0: print(roc_auc_score(rows[:, 1], rows[:, 0]))
dist.destroy_process_group()
