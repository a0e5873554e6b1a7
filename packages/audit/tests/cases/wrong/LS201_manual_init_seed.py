"""Data parallel without DDP: average the gradients after backward."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


class Worker:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed + self.rank)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr)
        g = torch.Generator().manual_seed(args.seed)
        x = torch.randn(512, 8, generator=g)
        self.x, self.y = x[self.rank :: self.world], x[self.rank :: self.world].mean(1, keepdim=True)

    def step(self, idx):
        self.opt.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x[idx]), self.y[idx])
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.opt.step()
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    w = Worker(args)
    for epoch in range(3):
        for idx in torch.randperm(len(w.x)).split(16):
            loss = w.step(idx)
        if w.rank == 0:
            print(f"epoch {epoch} loss {loss:.5f}")
    if w.rank == 0:
        torch.save(w.model.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
