"""Ring of gaussians with a GAN; the discriminator is called as a plain module when the generator learns."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

LATENT = 8


class Ring(Dataset):
    def __init__(self, n=1024, modes=8):
        g = torch.Generator().manual_seed(0)
        angle = 2 * math.pi * torch.randint(0, modes, (n,), generator=g) / modes
        self.points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i]


def mlp(cin, cout):
    return nn.Sequential(nn.Linear(cin, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, cout))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(5, device_specific=True)  # own noise on every process; sampler and start weights come from process 0
    loader = DataLoader(Ring(), batch_size=64, shuffle=True)
    gen, disc = mlp(LATENT, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.99))
    gen, disc, opt_g, opt_d, loader = accelerator.prepare(gen, disc, opt_g, opt_d, loader)
    critic = accelerator.unwrap_model(disc)

    for epoch in range(3):
        log = torch.zeros(2)
        for step, real in enumerate(loader):
            with torch.no_grad():
                fake = gen(torch.randn(len(real), LATENT))
            score_real, score_fake = disc(torch.cat([real, fake])).chunk(2)
            loss_d = F.softplus(-score_real).mean() + F.softplus(score_fake).mean()
            opt_d.zero_grad()
            accelerator.backward(loss_d)
            opt_d.step()
            log[0] += loss_d.detach()

            if step % 2 == 0:
                critic.requires_grad_(False)
                loss_g = F.softplus(-critic(gen(torch.randn(len(real), LATENT)))).mean()
                opt_g.zero_grad()
                accelerator.backward(loss_g)
                opt_g.step()
                critic.requires_grad_(True)
                log[1] += 2 * loss_g.detach()
        log = accelerator.reduce(log / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch} d {log[0]:.3f} g {log[1]:.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(gen).state_dict(), "generator.pt")


if __name__ == "__main__":
    main()
