import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x.square().sum(1, keepdim=True))


@torch.no_grad()
def evaluate(net, ds):
    net.eval()
    x, y = ds.tensors
    loss = nn.functional.mse_loss(net(x), y).item()
    net.train()
    return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    train, val = make(96, 1), make(37, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), 0.02)
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        decision = torch.zeros(1)
        if rank == 0:
            loss = evaluate(model.module, val)
            print(f"epoch {epoch}: val {loss:.3f}")
            if loss < best:
                best = loss
                torch.save(model.module.state_dict(), "best.pt")
            else:
                decision.fill_(1)
        dist.broadcast(decision, src=0)
        if decision.item():
            for group in opt.param_groups:
                group["lr"] *= 0.5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
