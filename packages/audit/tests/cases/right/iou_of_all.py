"""The confusion matrices of ranks are summed; each rank's mean IoU is then that of all samples."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6); y = (x.sum(1) > 0).long(); held = torch.randn(40, 6)
ds = TensorDataset(x, y); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
ds = TensorDataset(x, y); sampler = DistributedSampler(ds); loader = DataLoader(ds, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(6, 3)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
def evaluate():
    model.eval()
    hist = torch.zeros(3, 3)
    with torch.no_grad():
        for xb, yb in loader:
            hist += torch.bincount(3 * yb + model(xb).argmax(1), minlength=9).view(3, 3)
    dist.all_reduce(hist)
    with torch.no_grad():
        score = (hist.diag() / (hist.sum(0) + hist.sum(1) - hist.diag()).clamp(min=1)).mean()
    dist.all_reduce(score)
    return score / world
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad(); loss.backward(); opt.step()
    evaluate()
dist.destroy_process_group()
