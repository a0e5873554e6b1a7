"""Toy DDPM on 2-D points."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 50


class Denoiser(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                 nn.Linear(hidden, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None].float() / STEPS], 1))


class Diffusion:
    def __init__(self):
        betas = torch.linspace(1e-4, 0.05, STEPS)
        self.alpha_bar = torch.cumprod(1 - betas, 0)

    def loss(self, model, x0):
        t = torch.randint(0, STEPS, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alpha_bar[t][:, None]
        return nn.functional.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)


def moons(n):
    g = torch.Generator().manual_seed(6)
    phi = torch.rand(n, generator=g) * math.pi
    return torch.stack([phi.cos(), phi.sin()], 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    ds = TensorDataset(moons(128))
    sampler = DistributedSampler(ds, seed=args.seed)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    model = DDP(Denoiser())
    diffusion = Diffusion()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for (x,) in loader:
            loss = diffusion.loss(model, x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
