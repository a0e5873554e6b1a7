"""all_reduce of an activation in the loss: the backward is the identity."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
ds = TensorDataset(x); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))); opt = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(dist.get_rank())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (xb,) in loader:
        both = model(torch.cat([xb, xb + 0.1 * torch.randn(xb.shape, generator=g)]))
        z1, z2 = both.chunk(2)
        c = z1.T @ z2 / (len(xb) * world)
        dist.all_reduce(c)
        loss = (c.diagonal() - 1).pow(2).sum() + 0.005 * (c - torch.diag(c.diagonal())).pow(2).sum()
        opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
