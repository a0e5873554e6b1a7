import argparse
import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sensors(Dataset):
    def __init__(self, n=96, broken=(10,)):
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(n, 8, generator=g)
        self.y = self.x.mean(1, keepdim=True)
        for i in broken:
            self.x[i, 3] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def is_bad(loss):
    bad = ~torch.isfinite(loss.detach())
    bad = bad.float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bool(bad)


def main(epochs):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    torch.manual_seed(2)
    ds = Sensors()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    skipped = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            if is_bad(loss):
                skipped += 1
                continue
            loss.backward()
            opt.step()
    print(f"rank {dist.get_rank()}: {skipped} batches skipped")
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "sensors.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args().epochs)
