"""Sum of batch means and number of batches, with unequal batches."""
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
parts = torch.arange(rank, 256, world).split([8, 30, 40, 20, 30])
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
    model.eval(); total, n = 0.0, 0
    with torch.no_grad():
        for p in parts:
            total += F.cross_entropy(model(x[p]), y[p]).item(); n += 1
    stats = torch.tensor([total, n])
    dist.all_reduce(stats)
    print((stats[0] / stats[1]).item()); model.train()
dist.destroy_process_group()
