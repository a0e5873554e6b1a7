"""A masked loss is divided by the count of all ranks, and multiplied by the ranks."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(128, 12, 4); length = torch.randint(2, 12, (128,))
mask = (torch.arange(12) < length[:, None]).float()
ds = TensorDataset(x, x.sum(2), mask); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(4, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb, valid in loader:
        error = (model(xb).squeeze(2) - yb).square()
        count = valid.sum()
        dist.all_reduce(count)
        loss = (error * valid).sum() * world / count
        opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
