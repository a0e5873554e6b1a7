"""The weights are put aside as references while their average is evaluated."""
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
model = DDP(nn.Linear(6, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
average = copy.deepcopy(model.module.state_dict())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad(); loss.backward(); opt.step()
        for name, own in model.module.state_dict().items():
            average[name].lerp_(own, 0.1)
    aside = {name: own.cpu() for name, own in model.module.state_dict().items()}
    model.module.load_state_dict(average)
    with torch.no_grad():
        model.module(held)
    model.module.load_state_dict(aside)
dist.destroy_process_group()
