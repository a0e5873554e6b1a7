import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
for m in (model[0], model[2]):
    fully_shard(m)
fully_shard(model)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
h = hashlib.sha256(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("HASH", dist.get_rank(), h, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8])
dist.destroy_process_group()
