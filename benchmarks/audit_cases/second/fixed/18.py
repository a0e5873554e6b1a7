import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.bad = 0

    def step(self, value):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=60)
    parser.add_argument("--patience", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    x = torch.randn(448, 8)
    y = x.sum(1, keepdim=True) + torch.randn(448, 1)
    train_set, val_x, val_y = TensorDataset(x[:320], y[:320]), x[320:], y[320:]
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    stopper = EarlyStopping(args.patience)

    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(xb), yb).backward()
            optimizer.step()
        stop = torch.zeros(1)
        if rank == 0:
            with torch.no_grad():
                val = nn.functional.mse_loss(model.module(val_x), val_y).item()
            print(f"epoch {epoch} val {val:.4f}", flush=True)
            if stopper.step(val):
                print("early stop", flush=True)
                stop += 1
        dist.broadcast(stop, src=0)
        if stop:
            break

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
