import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main(accum=4):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(144, 6, generator=g)
    ds = TensorDataset(x, x.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler)  # 9 batches on each rank
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for window in windows(loader, accum):
            for i, (bx, by) in enumerate(window):
                with contextlib.nullcontext() if i == len(window) - 1 else model.no_sync():
                    loss = nn.functional.mse_loss(model(bx), by)
                    (loss / len(window)).backward()
                total += loss.detach()
            opt.step()
            opt.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
