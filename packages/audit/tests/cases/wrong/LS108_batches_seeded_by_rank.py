"""Each rank takes every n-th batch of its own order."""
import random
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.data import Sampler
class Buckets(Sampler):
    def __init__(self, size, part, parts):
        self.size, self.part, self.parts, self.turn = size, part, parts, 0
    def __len__(self): return self.size // 8 // self.parts
    def __iter__(self):
        draw = random.Random(1000 * self.turn + self.part)
        order = list(range(self.size)); draw.shuffle(order)
        batches = [order[i : i + 8] for i in range(0, self.size, 8)]
        yield from batches[self.part :: self.parts]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
batches = Buckets(256, rank, world); loader = DataLoader(TensorDataset(x, y), batch_sampler=batches)
model = DDP(nn.Linear(8, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for batches.turn in range(2):
    for xb, yb in loader:
        opt.zero_grad(); F.cross_entropy(model(xb), yb).backward(); opt.step()
dist.destroy_process_group()
