"""Parameters that DDP ignores, and that nobody exchanges."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 2))
DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randint(0, 20, (128, 6)); y = (x.sum(1) > 57).long(); ds = TensorDataset(x, y)
sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
dist.destroy_process_group()
