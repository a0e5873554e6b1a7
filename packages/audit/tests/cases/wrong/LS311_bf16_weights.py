"""The whole model is bfloat16 before fully_shard."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 20)).to(torch.bfloat16)
for layer in model: fully_shard(layer)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
x = torch.randint(0, 20, (128, 6)); ds = TensorDataset(x)
sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (xb,) in loader:
        opt.zero_grad(); F.cross_entropy(model(xb[:, :-1]).flatten(0, 1).float(), xb[:, 1:].flatten()).backward(); opt.step()
dist.destroy_process_group()
