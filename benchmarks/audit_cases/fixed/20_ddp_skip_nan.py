import logging
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("train")


class SensorLogs(Dataset):
    """Readings of sensors; a few rows are damaged, as in the real recordings."""

    def __init__(self, n=416):
        g = torch.Generator().manual_seed(18)
        self.x = torch.randn(n, 7, generator=g)
        self.y = self.x.pow(2).sum(1, keepdim=True).sqrt()
        self.x[123, 4] = float("inf")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def train_step(model, batch, optimizer, step):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.l1_loss(model(x), y)
    bad = torch.tensor(0.0 if math.isfinite(loss.item()) else 1.0)
    dist.all_reduce(bad)
    if bad.item() > 0:
        log.warning("step %d: loss is %s, batch skipped", step, loss.item())
        return None
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = SensorLogs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = []
        for batch in loader:
            out = train_step(model, batch, optimizer, step)
            step += 1
            if out is not None:
                losses.append(out)
        dist.barrier()
        log.info("rank %d epoch %d mean %.4f", dist.get_rank(), epoch, sum(losses) / len(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
