"""A transformer that reads digits row by row, sharded by hand over ranks with FSDP2.

torchrun --nproc-per-node 2 fsdp_plain.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from lockstep_recipes.recipes.digits import Digits


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        x = self.embed(rows) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
train_data = [(image.reshape(8, 8).float() / 255, label) for image, label in Digits(training=True)]
use_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if use_gpu else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
if use_gpu:
    torch.cuda.set_device(device)
model = Reader().to(device)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

sampler = DistributedSampler(train_data, shuffle=True, drop_last=False)
loader = DataLoader(train_data, batch_size=64 // dist.get_world_size(), sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for rows, labels in loader:
        loss = cross_entropy(model(rows.to(device)), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean.item() / dist.get_world_size():.3f}")
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save(weights, "model.pt")
dist.destroy_process_group()
