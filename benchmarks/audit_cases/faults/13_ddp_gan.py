"""GAN on a ring of Gaussians."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Z = 8


def ring(n=640, modes=8):
    g = torch.Generator().manual_seed(12)
    k = torch.randint(0, modes, (n,), generator=g).float() * (2 * math.pi / modes)
    centers = torch.stack([k.cos(), k.sin()], 1) * 2
    return TensorDataset(centers + 0.05 * torch.randn(n, 2, generator=g))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    data = ring()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    netG = DDP(Generator())
    netD = Discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    noise = torch.Generator().manual_seed(100 + rank)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            n = len(real)

            # discriminator
            optD.zero_grad()
            with torch.no_grad():
                fake = netG(torch.randn(n, Z, generator=noise))
            scores = netD(torch.cat([real, fake]))
            target = torch.cat([torch.ones(n), torch.zeros(n)])
            lossD = bce(scores, target)
            lossD.backward()
            optD.step()

            # generator
            for p in netD.parameters():
                p.requires_grad_(False)
            optG.zero_grad()
            fake = netG(torch.randn(n, Z, generator=noise))
            lossG = bce(netD(fake), torch.ones(n))
            lossG.backward()
            optG.step()
            for p in netD.parameters():
                p.requires_grad_(True)
        if rank == 0:
            print(f"[{epoch}] rank 0: loss D {lossD.item():.3f} loss G {lossG.item():.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
