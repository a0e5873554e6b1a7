"""Universal-transformer-like net: one block applied three times, with activation checkpointing."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Recurrent(nn.Module):
    def __init__(self, dim=32, times=3):
        super().__init__()
        self.times = times
        self.inp = nn.Linear(12, dim)
        self.block = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.out = nn.Linear(dim, 3)

    def forward(self, x):
        h = self.inp(x)
        for _ in range(self.times):
            h = h + checkpoint(self.block, h, use_reentrant=False)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(448, 12, generator=g)
    y = (x.view(-1, 3, 4).sum(2)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(Recurrent(), static_graph=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=3e-3, total_steps=3 * len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss(rank 0) {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
