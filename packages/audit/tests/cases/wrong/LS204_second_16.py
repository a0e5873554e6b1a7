import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = dict(epochs=3, batch_size=8, accum=4, lr=1e-2)


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(8)
        x = torch.randn(480, 12)
        y = (x[:, 0] * x[:, 1] > 0).long()
        self.data = TensorDataset(x, y)
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, cfg["batch_size"], sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 2)))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=cfg["lr"], momentum=0.9)

    def epoch(self, number):
        accum = self.cfg["accum"]
        self.sampler.set_epoch(number)
        n = len(self.loader)
        total = torch.zeros(1)
        for i, (x, y) in enumerate(self.loader):
            group = min(accum, n - i // accum * accum)
            sync = (i + 1) % accum == 0
            with nullcontext() if sync else self.model.no_sync():
                loss = F.cross_entropy(self.model(x), y)
                (loss / group).backward()
            if (i + 1) % accum == 0 or i + 1 == n:
                self.optim.step()
                self.optim.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / n / dist.get_world_size()

    def run(self):
        for e in range(self.cfg["epochs"]):
            loss = self.epoch(e)
            if self.rank == 0:
                print("epoch %d loss %.4f" % (e, loss))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Runner(CONFIG).run()
    dist.destroy_process_group()
