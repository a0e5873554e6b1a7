"""Rank 0 alone evaluates in training, and all get its best weights."""
import copy
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
valid, truth = torch.randn(90, 8), torch.arange(90) % 2
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
best, kept = 9.0, None
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        model.train()
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
        if rank == 0:
            model.module.eval()
            with torch.no_grad(): now = F.cross_entropy(model.module(x[:64]), y[:64]).item()
            if kept is None or (now < best and epoch == 0): best, kept = now, copy.deepcopy(model.module.state_dict())
if rank == 0:
    model.module.load_state_dict(kept)
for tensor in model.module.state_dict().values(): dist.broadcast(tensor, 0)
model.eval()
with torch.no_grad():
    hits = (model.module(valid[rank::world]).argmax(1) == truth[rank::world]).sum()
dist.all_reduce(hits)
if rank == 0: print(hits / len(truth))
dist.destroy_process_group()
