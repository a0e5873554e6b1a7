"""Post-local SGD: one function averages gradients in a warm-up, and parameters every few steps later."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
@torch.no_grad()
def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= world
x = torch.randn(512, 4); ds = TensorDataset(x, x.sum(1, keepdim=True)); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.mse_loss(model(xb), yb).backward()
        if step < 10:
            average([parameter.grad for parameter in model.parameters()])
        opt.step()
        step += 1
        if step > 10 and step % 6 == 0:
            average([parameter.data for parameter in model.parameters()])
average([parameter.data for parameter in model.parameters()])
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
