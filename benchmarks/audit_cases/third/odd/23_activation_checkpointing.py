import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Deep(nn.Module):
    def __init__(self, d=24, depth=4):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + checkpoint(b, x, use_reentrant=False)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = Deep()
    model = DDP(net)
    torch.manual_seed(7 + dist.get_rank())
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=g)
    ds = TensorDataset(x, x.prod(1, keepdim=True).tanh())
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            loss = nn.functional.mse_loss(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / 2:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
