"""A detector divides a dict of weighted losses by the boxes of all ranks, under a wrapper that averages."""
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 12, 4); held = (torch.rand(128, 12) < 0.3).float()
ds = TensorDataset(x, x.sum(2, keepdim=True), held); sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(4, 2)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
weights = {"class": 1.0, "box": 5.0}
def criterion(out, box, held):
    boxes = held.sum()
    dist.all_reduce(boxes)
    boxes = torch.clamp(boxes, min=1).item()
    scores = F.binary_cross_entropy_with_logits(out[..., 0], held, reduction="sum")
    return {"class": scores / boxes, "box": (F.l1_loss(out[..., 1:], box, reduction="none") * held[..., None]).sum() / boxes}
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb, hb in loader:
        losses = criterion(model(xb), yb, hb)
        loss = sum(losses[name] * weights[name] for name in losses)
        opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
