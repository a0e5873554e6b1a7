"""Results of collectives that are used, and barriers."""
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
def summed(v):
    t = torch.tensor(v); dist.all_reduce(t); return t.item()
def sync(): dist.all_reduce(torch.zeros(1))
class Keep:
    def __init__(self): self.seed = torch.tensor([rank + 7]); dist.broadcast(self.seed, 0)
keep = Keep()
for epoch in range(2):
    order = list(range(256)); random.shuffle(order)
    box = [order if rank == 0 else None]
    dist.broadcast_object_list(box, src=0); order = box[0]
    mine = order[rank::world]; total = 0.0
    for i in range(0, 128, 16):
        b = mine[i:i + 16]
        loss = F.cross_entropy(model(x[b]), y[b]); opt.zero_grad(); loss.backward(); opt.step(); total += loss.item()
    sync(); w = dist.all_reduce(torch.ones(1), async_op=True); w.wait()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]); dist.all_reduce(flat); check = float(flat.sum())
    if rank == 0: print(summed.__name__)
    print(summed(total), int(keep.seed))
dist.destroy_process_group()
