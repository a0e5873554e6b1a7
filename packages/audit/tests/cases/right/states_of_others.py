"""States are loaded at once, into another model, with some new tensors, or as clones."""
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
net = nn.Linear(6, 2); other = nn.Linear(6, 2)
state = net.state_dict(); state["bias"] = torch.zeros(2); net.load_state_dict(state)
model = DDP(net); opt = torch.optim.SGD(model.parameters(), lr=0.1)
state, start = net.state_dict(), {name: each.clone() for name, each in net.state_dict().items()}
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad(); loss.backward(); opt.step()
    other.load_state_dict(state)
    net.load_state_dict(net.state_dict())
aside = {name: each.clone() for name, each in net.state_dict().items()}
net.load_state_dict(start)
net.load_state_dict(aside)
dist.destroy_process_group()
