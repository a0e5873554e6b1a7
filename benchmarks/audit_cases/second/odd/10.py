# data parallel training by hand, without the DDP wrapper
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sync_model(model):
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)


def sync_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in model.parameters()]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat.div_(dist.get_world_size())
    for g, s in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(s)


class Experts(nn.Module):
    """Each batch goes through one expert only."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 24)
        self.experts = nn.ModuleList(nn.Linear(24, 2) for _ in range(3))

    def forward(self, x, which):
        return self.experts[which](F.relu(self.stem(x)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.randn(600, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = Experts()
    sync_model(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    choice = torch.Generator().manual_seed(70 + rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            which = int(torch.randint(3, (1,), generator=choice))
            loss = F.cross_entropy(model(xb, which), yb)
            opt.zero_grad()
            loss.backward()
            sync_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
