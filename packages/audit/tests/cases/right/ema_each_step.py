"""EMA updated after each step of several micro-batches; the average is evaluated."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
import copy, contextlib
model = DDP(nn.Linear(8, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
ema = copy.deepcopy(model.module)
def update_ema(d=0.99):
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.module.parameters()): a.mul_(d).add_(b, alpha=1 - d)
sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (xb, yb) in enumerate(loader):
        last = (i + 1) % 4 == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (F.cross_entropy(model(xb), yb) / 4).backward()
        if last:
            opt.step(); opt.zero_grad()
            update_ema()
dist.destroy_process_group()
