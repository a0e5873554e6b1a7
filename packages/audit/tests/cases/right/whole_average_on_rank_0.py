"""With FSDP2, rank 0 loads the gathered average into a new model of the same class, after the training."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
def make():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
model = make()
fully_shard(model)
x = torch.randn(128, 4); ds = TensorDataset(x, x.sum(1, keepdim=True)); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad(); F.mse_loss(model(xb), yb).backward(); opt.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                shadow[name].to_local().lerp_(parameter.to_local(), 0.1)
whole = {name: value.full_tensor() for name, value in shadow.items()}
if rank == 0:
    average = make()
    average.load_state_dict(whole)
    print(F.mse_loss(average(x), x.sum(1, keepdim=True)).item())
dist.barrier()
dist.destroy_process_group()
