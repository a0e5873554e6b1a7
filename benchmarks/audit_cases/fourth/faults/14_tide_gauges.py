"""Tide gauge forecasting with a GRU. A gauge that drops out delivers nan."""
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def gauges(n, seed, dropouts=()):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(25).float()
    phase, speed = torch.rand(n, 1, generator=g) * 6.28, 0.4 + 0.3 * torch.rand(n, 1, generator=g)
    level = torch.sin(speed * t + phase) + 0.1 * torch.randn(n, 25, generator=g)
    for i in dropouts:
        level[i, 10:14] = float("nan")
    return TensorDataset(level[:, :24, None], level[:, 24:])


class Tide(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 20, batch_first=True)
        self.out = nn.Linear(20, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    train, val = gauges(384, 1, dropouts=(41,)), gauges(96, 2)
    sampler = DistributedSampler(train, seed=4)
    loader = DataLoader(train, 16, sampler=sampler)
    model = DDP(Tide())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        used = 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            if not torch.isfinite(loss):
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
            used += 1
        print(f"[{rank}] epoch {epoch}: {used} of {len(loader)} batches", flush=True)
        model.eval()
        with torch.no_grad():
            x, y = val[rank::world]
            se = (model.module(x) - y).square().sum()
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch}: val mse {se.item() / len(val):.5f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "tide.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
