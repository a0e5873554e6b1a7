import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def average(tensors):
    for t in tensors:
        dist.all_reduce(t)
        t /= dist.get_world_size()


def synchronize(model, optimizer):
    average([p.data for p in model.parameters()])
    average([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local-steps", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(128, 6, generator=g)
    ds = TensorDataset(x, x.cos().sum(1, keepdim=True))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            loss = nn.functional.mse_loss(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            if step % args.local_steps == 0:
                synchronize(model, optimizer)
        synchronize(model, optimizer)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "local_sgd.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
