"""A stream resumes in one process, and skips too few samples: it forgets the accumulation."""
import os
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.data import IterableDataset
class Rows(IterableDataset):
    def __init__(self, epoch, part, parts, skip): self.epoch, self.part, self.parts, self.skip = epoch, part, parts, skip
    def __iter__(self):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(self.epoch))
        for i in order[self.part :: self.parts][self.skip :].tolist(): yield x[i], y[i]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8); y = (x.sum(1) > 0).long()
def train(stop):
    net = nn.Linear(8, 2); opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    first, step = 0, 0
    if os.path.exists("rows.pt"):
        state = torch.load("rows.pt")
        net.load_state_dict(state["net"]); opt.load_state_dict(state["opt"]); first, step = state["at"]
    model = DDP(net)
    for epoch in range(first, 2):
        rows = Rows(epoch, rank, world, skip=step * 4)
        for number, (xb, yb) in enumerate(DataLoader(rows, batch_size=4), 1):
            (F.cross_entropy(model(xb), yb) / 2).backward()
            if number % 2: continue
            opt.step(); opt.zero_grad(); step += 1
            if step == stop:
                dist.barrier()
                if rank == 0: torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "at": (epoch, step)}, "rows.pt")
                return dist.barrier()
        step = 0
train(10); train(None)
dist.destroy_process_group()
