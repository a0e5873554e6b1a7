"""Unconditional DDPM on 8x8 blobs."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

T = 100


class Blobs(Dataset):
    """Gaussian bumps at random places, scaled to [-1, 1]."""

    def __init__(self, n=512, size=8):
        g = torch.Generator().manual_seed(1234)
        centre = torch.rand(n, 2, generator=g) * (size - 1)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        d2 = (yy - centre[:, 0, None, None]) ** 2 + (xx - centre[:, 1, None, None]) ** 2
        self.images = (2 * torch.exp(-d2 / 4) - 1).unsqueeze(1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class Denoiser(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.time = nn.Embedding(T, ch)
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.mid = nn.Conv2d(ch, ch, 3, padding=1)
        self.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t)[:, :, None, None])
        return self.out(F.silu(self.mid(h)))


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)

    betas = torch.linspace(1e-4, 0.05, T)
    alphas_bar = torch.cumprod(1 - betas, dim=0)

    loader = DataLoader(Blobs(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for x0 in loader:
            noise = torch.randn_like(x0)
            t = torch.randint(0, T, (x0.size(0),), device=x0.device)
            ab = alphas_bar[t].view(-1, 1, 1, 1)
            xt = ab.sqrt() * x0 + (1 - ab).sqrt() * noise
            loss = F.mse_loss(model(xt, t), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
        mean = accelerator.reduce(total / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch} step {step} loss {mean.item():.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "ddpm.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
