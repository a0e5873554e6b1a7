import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.ff(x)


class Shared(nn.Module):
    """One block applied several times, recomputed in backward; the auxiliary head is not used."""

    def __init__(self, d=24, repeats=3):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.block = Block(d)
        self.out = nn.Linear(d, 3)
        self.aux = nn.Linear(d, 3)
        self.repeats = repeats

    def forward(self, x):
        x = self.inp(x)
        for _ in range(self.repeats):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    g = torch.Generator().manual_seed(0)
    x = torch.randn(384, 6, generator=g)
    data = TensorDataset(x, x[:, :3].abs().argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(Shared(), static_graph=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
