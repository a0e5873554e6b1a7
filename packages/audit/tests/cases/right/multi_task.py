"""Multi-task: one batch of each task a step, losses summed by repeated backward at one line."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.t = nn.Linear(8, 16); self.h = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])
    def forward(self, x, k): return self.h[k](self.t(x).relu())
sets = []
for k in range(2):
    x = torch.randn(128, 8); sets.append(TensorDataset(x, (x[:, k] > 0).long()))
samplers = [DistributedSampler(s) for s in sets]
loaders = [DataLoader(s, batch_size=8, sampler=sm) for s, sm in zip(sets, samplers)]
model = DDP(Net(), find_unused_parameters=True); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for sm in samplers: sm.set_epoch(epoch)
    for batches in zip(*loaders):
        opt.zero_grad()
        for k, (xb, yb) in enumerate(batches):
            F.cross_entropy(model(xb, k), yb).backward()
        opt.step()
dist.destroy_process_group()
