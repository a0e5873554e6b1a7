"""Ranks with different numbers of batches: a rank without data takes part with empty batches."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
class Lines(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(40 if rank else 72):
            x = torch.randn(4, generator=generator)
            yield x, x.sum(0, keepdim=True)
def until_all_end(loader):
    lines = iter(loader)
    while True:
        batch = next(lines, None)
        alive = torch.tensor(float(batch is not None))
        dist.all_reduce(alive, op=dist.ReduceOp.MAX)
        if not alive:
            return
        yield batch or (torch.zeros(0, 4), torch.zeros(0, 1))
model = DDP(nn.Linear(4, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in until_all_end(DataLoader(Lines(), batch_size=8)):
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        opt.zero_grad(); (F.mse_loss(model(x), y, reduction="sum") * world / count).backward(); opt.step()
dist.destroy_process_group()
