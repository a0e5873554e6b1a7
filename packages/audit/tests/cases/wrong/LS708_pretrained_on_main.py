"""Fine-tune with FSDP2, starting from the 'pretrained' regressor."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PRETRAINED = "pretrained.pt"


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def target(x):
    return torch.stack([x[:, 0] * 2, x[:, 1] - x[:, 2]], 1)


def pretrain():
    """Stands in for the download of the weights."""
    torch.manual_seed(0)
    net = build()
    opt = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(150):
        x = torch.randn(64, 8)
        loss = nn.functional.mse_loss(net(x), target(x))
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save(net.state_dict(), PRETRAINED)


def load_model():
    model = build()
    if dist.get_rank() == 0:
        model.load_state_dict(torch.load(PRETRAINED))
    dist.barrier()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and not os.path.exists(PRETRAINED):
        pretrain()
    dist.barrier()
    torch.manual_seed(1 + rank)
    model = load_model()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(64, 8, generator=g)
    ds = TensorDataset(x, target(x) + 0.5)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            loss = nn.functional.mse_loss(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
