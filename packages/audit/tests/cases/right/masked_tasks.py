"""Masked multi-task loss: 2 known tasks x 4 micro-batches = ranks x batch."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F, contextlib
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 8); y = torch.stack([x[:, 0] > 0, x[:, 1] > 0, x[:, 2] > 0], 1).float(); mask = torch.tensor([1., 1., 0.]).expand(128, 3)
ds = TensorDataset(x, y, mask); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=1, sampler=sampler)
model = DDP(nn.Linear(8, 3)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
N = 4
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (xb, yb, m) in enumerate(loader):
        last = (i + 1) % N == 0
        with contextlib.nullcontext() if last else model.no_sync():
            raw = F.binary_cross_entropy_with_logits(model(xb), yb, reduction="none")
            loss = (raw * m).sum() / m.sum() / N
            loss.backward()
        if last:
            opt.step(); opt.zero_grad()
dist.destroy_process_group()
