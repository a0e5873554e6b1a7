import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = "checkpoint.pt"


class Experiment:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(2)
        x = torch.randn(96, 6, generator=g)
        ds = TensorDataset(x, (x ** 2).sum(1, keepdim=True))
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, batch_size=8, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.start_epoch = 0

    def save(self, epoch):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "epoch": epoch + 1}, CKPT)
        dist.barrier()

    def load(self):
        ckpt = torch.load(CKPT, map_location="cpu")
        self.model.module.load_state_dict(ckpt["model"])
        if self.rank == 0:
            self.optimizer.load_state_dict(ckpt["optimizer"])
        self.start_epoch = ckpt["epoch"]

    def run(self):
        if self.args.resume and os.path.exists(CKPT):
            self.load()
        for epoch in range(self.start_epoch, self.args.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
            if self.rank == 0:
                print(f"epoch {epoch} done")
            self.save(epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    dist.init_process_group("gloo")
    Experiment(parser.parse_args()).run()
    dist.destroy_process_group()
