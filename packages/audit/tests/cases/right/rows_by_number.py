"""Gathered predictions are written by the gathered numbers of their rows, so padding overwrites itself."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6); y = (x.sum(1) > 0).long(); held = torch.randn(40, 6)
ds = TensorDataset(torch.arange(95), x[:95], y[:95]); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(6, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
ordered = DataLoader(ds, batch_size=8, sampler=DistributedSampler(ds, shuffle=False))
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for _, xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad(); loss.backward(); opt.step()
    model.eval()
    with torch.no_grad():
        rows, own = zip(*((numbers, model(xb).argmax(1)) for numbers, xb, _ in ordered))
    rows, own = torch.cat(rows), torch.cat(own)
    all_rows, all_own = ([torch.empty_like(each) for _ in range(world)] for each in (rows, own))
    dist.all_gather(all_rows, rows)
    dist.all_gather(all_own, own)
    result = torch.zeros(95, dtype=torch.long)
    result[torch.cat(all_rows)] = torch.cat(all_own)
    print((result == y[:95]).float().mean())
dist.destroy_process_group()
