"""Two stages by send/recv, GPipe: 4 micro-batches, mean losses, gradients divided once after all backward passes."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(160, 8); y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
stage = nn.Sequential(nn.Linear(8, 16), nn.ReLU()) if rank == 0 else nn.Linear(16, 2)
opt = torch.optim.SGD(stage.parameters(), lr=0.1)
N = 4
for epoch in range(2):
    for xb, yb in loader:
        opt.zero_grad()
        outs = []
        for xm, ym in zip(xb.chunk(N), yb.chunk(N)):
            if rank == 0:
                h = stage(xm); dist.send(h.detach(), 1); outs.append(h)
            else:
                h = torch.empty(len(xm), 16); dist.recv(h, 0); h.requires_grad_(); outs.append((h, F.cross_entropy(stage(h), ym)))
        for o in outs:
            if rank == 0:
                g = torch.empty_like(o); dist.recv(g, 1); o.backward(g)
            else:
                h, loss = o; loss.backward(); dist.send(h.grad, 0)
        for p in stage.parameters():
            p.grad.div_(N)
        opt.step()
dist.destroy_process_group()
