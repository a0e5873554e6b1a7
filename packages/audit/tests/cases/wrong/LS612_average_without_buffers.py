"""An average of the parameters is evaluated with the running statistics of a new model."""
import copy
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6); y = (x.sum(1) > 0).long(); held = torch.randn(40, 6)
ds = TensorDataset(x, y); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)); model = DDP(net)
ema = copy.deepcopy(net).eval().requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad(); loss.backward(); opt.step()
        for one, own in zip(ema.parameters(), net.parameters()):
            one.lerp_(own.detach(), 0.1)
with torch.no_grad():
    ema(held)
dist.destroy_process_group()
