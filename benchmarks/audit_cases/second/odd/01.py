"""GAN on a ring of Gaussians. Both networks are data parallel, each with its own optimizer."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Z = 8


def ring(n=1024):
    g = torch.Generator().manual_seed(0)
    k = torch.randint(8, (n,), generator=g) * (2 * math.pi / 8)
    return torch.stack([k.cos(), k.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, o))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    data = TensorDataset(ring())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    gen, disc = DDP(mlp(Z, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=4e-4, betas=(0.5, 0.999))

    for epoch in range(3):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for (real,) in loader:
            # discriminator
            fake = gen(torch.randn(len(real), Z)).detach()
            logits = disc(torch.cat([real, fake]))
            target = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            loss_d = F.binary_cross_entropy_with_logits(logits, target)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            # generator; the discriminator is frozen and called without its wrapper
            disc.module.requires_grad_(False)
            out = disc.module(gen(torch.randn(len(real), Z)))
            loss_g = F.binary_cross_entropy_with_logits(out, torch.ones_like(out))
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            disc.module.requires_grad_(True)
            sums += torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(sums)
        if rank == 0:
            d, g = (sums / len(loader) / dist.get_world_size()).tolist()
            print(f"epoch {epoch} D {d:.4f} G {g:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
