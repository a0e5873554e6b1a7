"""A GAN on a ring of gaussians; the two networks learn in turn."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, Z, CRITIC_STEPS = 3, 64, 8, 2


def ring(n=2048, seed=6):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.randint(0, 8, (n,), generator=g) / 8
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, o))


def freeze(module, frozen):
    for p in module.parameters():
        p.requires_grad_(not frozen)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    gen, disc = DDP(mlp(Z, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.99))

    data = ring()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    noise = torch.Generator().manual_seed(900 + rank)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        log = torch.zeros(4)
        for step, (real,) in enumerate(loader):
            with torch.no_grad():
                fake = gen.module(torch.randn(len(real), Z, generator=noise))
            score = disc(torch.cat([real, fake])).squeeze(1)
            target = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
            d_loss = F.binary_cross_entropy_with_logits(score, target)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            log += torch.tensor([d_loss.item(), 1.0, 0.0, 0.0])

            if (step + 1) % CRITIC_STEPS == 0:
                # the discriminator only passes gradients through here, so its bare module is enough
                freeze(disc.module, True)
                out = disc.module(gen(torch.randn(BATCH, Z, generator=noise))).squeeze(1)
                g_loss = F.softplus(-out).mean()
                opt_g.zero_grad()
                g_loss.backward()
                opt_g.step()
                freeze(disc.module, False)
                log += torch.tensor([0.0, 0.0, g_loss.item(), 1.0])
        dist.all_reduce(log)
        if rank == 0:
            print(f"epoch {epoch}: D {log[0] / log[1]:.4f} G {log[2] / log[3]:.4f}")

    if rank == 0:
        torch.save({"gen": gen.module.state_dict(), "disc": disc.module.state_dict()}, "gan.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
