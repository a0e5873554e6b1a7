"""The result of broadcast_object_list is thrown away."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
import random
random.seed(rank)
model = DDP(nn.Linear(8, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    order = list(range(256)); random.shuffle(order)
    dist.broadcast_object_list([order], src=0)
    mine = order[rank::world]
    for i in range(0, 128, 16):
        b = mine[i:i + 16]
        opt.zero_grad(); F.cross_entropy(model(x[b]), y[b]).backward(); opt.step()
dist.destroy_process_group()
