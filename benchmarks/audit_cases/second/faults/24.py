import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_model():
    return nn.Sequential(
        nn.Linear(10, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 1),
    )


def save_model(model, path):
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            value = value.to_local()
        state[name] = value.detach().cpu().clone()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--out", default="checkpoints")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    y = x.prod(1, keepdim=True).tanh() + x[:, :1]
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)

    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    os.makedirs(args.out, exist_ok=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mse {total.item() / len(loader) / dist.get_world_size():.4f}")
        save_model(model, os.path.join(args.out, f"epoch{epoch}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
