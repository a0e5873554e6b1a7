"""A frozen teacher in the model is updated on all ranks."""
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
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
    def forward(self, x):
        return self.student(x), self.teacher(x)
both = DDP(Both()); opt = torch.optim.Adam(both.module.student.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        out, soft = both(xb)
        loss = F.cross_entropy(out, yb) + F.mse_loss(out, soft)
        opt.zero_grad(); loss.backward(); opt.step()
        for t, s in zip(both.module.teacher.parameters(), both.module.student.parameters()): t.data.lerp_(s.data, 0.05)
dist.destroy_process_group()
