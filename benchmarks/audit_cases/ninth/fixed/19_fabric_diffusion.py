"""Denoising diffusion on a 2-d spiral, trained with Lightning Fabric."""
import math

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spiral(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, generator=g).sqrt()
    theta = 4 * math.pi * r
    points = torch.stack([r * theta.cos(), r * theta.sin()], dim=1)
    return points + 0.02 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, hidden), nn.SiLU())
        self.inp = nn.Linear(2, hidden)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2))

    def forward(self, x, t):
        return self.body(self.inp(x) + self.time(t[:, None]))


class GaussianDiffusion:
    """Noise schedule, training loss and sampler around a noise-prediction network."""

    def __init__(self, net, steps=50):
        self.net = net
        self.steps = steps
        self.betas = torch.linspace(1e-4, 0.05, steps)
        self.alpha_bar = torch.cumprod(1 - self.betas, dim=0)

    def loss(self, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alpha_bar[t][:, None]
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return (self.net(xt, t.float() / self.steps) - noise).pow(2).mean()

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2)
        for i in reversed(range(self.steps)):
            eps = self.net(x, torch.full((n,), i / self.steps))
            x = (x - self.betas[i] / (1 - self.alpha_bar[i]).sqrt() * eps) / (1 - self.betas[i]).sqrt()
            if i > 0:
                x = x + self.betas[i].sqrt() * torch.randn_like(x)
        return x


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(17)

    net = Denoiser()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    net, optimizer = fabric.setup(net, optimizer)
    diffusion = GaussianDiffusion(net)

    loader = DataLoader(TensorDataset(spiral(2048)), batch_size=64, shuffle=True, drop_last=True)
    loader = fabric.setup_dataloaders(loader)
    torch.manual_seed(17 + fabric.global_rank)

    for epoch in range(6):
        net.train()
        total = torch.zeros(())
        for (x0,) in loader:
            optimizer.zero_grad()
            loss = diffusion.loss(x0)
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = fabric.all_reduce(total / len(loader), reduce_op="mean")
        fabric.print(f"epoch {epoch} loss {mean.item():.4f}")

    net.eval()
    if fabric.global_rank == 0:
        radius = GaussianDiffusion(net.module).sample(256).norm(dim=1)
        print(f"sample radius {radius.mean():.3f} +- {radius.std():.3f}")
        torch.save(net.state_dict(), "denoiser.pt")


if __name__ == "__main__":
    main()
