"""Property regression on fingerprint vectors with sharded residual MLP blocks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BITS = 128


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class PropertyNet(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(BITS, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def make_molecules(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(n, BITS, generator=g) < 0.15).float()
    w = torch.randn(BITS, generator=torch.Generator().manual_seed(77))
    return TensorDataset(x, x @ w / 4 + 0.1 * torch.randn(n, generator=g))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    err = torch.zeros(2)
    for x, y in loader:
        err += torch.tensor([F.l1_loss(model(x).squeeze(-1), y, reduction="sum").item(), len(y)])
    dist.all_reduce(err)
    model.train()
    return (err[0] / err[1]).item()


def save_best(model, epoch, mae, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        tmp = path + ".tmp"
        torch.save({"model": state, "epoch": epoch, "mae": mae}, tmp)
        os.replace(tmp, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)

    model = PropertyNet()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    train_set, val_set = make_molecules(640, seed=1), make_molecules(128, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=32, sampler=DistributedSampler(val_set, shuffle=False))

    best = float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.mse_loss(model(x).squeeze(-1), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mae = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} val MAE {mae:.4f}", flush=True)
        if mae < best:
            best = mae
            save_best(model, epoch, mae, "property_best.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
