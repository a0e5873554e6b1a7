import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

T = 50
EPOCHS = 3
BATCH = 64


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        return self.out(h + self.mid(h))


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, generator=g).sqrt() * 3 * math.pi
    xy = torch.stack([r.cos() * r, r.sin() * r], dim=1) / (3 * math.pi)
    return xy + 0.02 * torch.randn(n, 2, generator=g)


def make_schedule():
    betas = torch.linspace(1e-4, 0.2, T)
    return torch.cumprod(1 - betas, dim=0)


@torch.no_grad()
def sample(model, alpha_bar, n=256):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    for step in reversed(range(T)):
        t = torch.full((n,), step)
        eps = model(x, t)
        x0 = (x - (1 - alpha_bar[step]).sqrt() * eps) / alpha_bar[step].sqrt()
        if step > 0:
            prev = alpha_bar[step - 1]
            x = prev.sqrt() * x0.clamp(-1.5, 1.5) + (1 - prev).sqrt() * eps
    return x0


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(11, device_specific=True)
    alpha_bar = make_schedule()

    train = TensorDataset(spiral(4096, seed=1))
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True)

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    net = accelerator.unwrap_model(model)

    for epoch in range(EPOCHS):
        net.train()
        running = torch.zeros(1)
        for (x,) in loader:
            t = torch.randint(0, T, (len(x),))
            noise = torch.randn_like(x)
            a = alpha_bar[t].unsqueeze(1)
            noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            pred = model(noisy, t)
            loss = F.mse_loss(pred, noise)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            running += loss.detach()
        mean = accelerator.reduce(running / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch} noise mse {mean.item():.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        net.eval()
        points = sample(net, alpha_bar)
        print(f"sample radius {points.norm(dim=1).mean():.3f}")
        torch.save({"model": net.state_dict(), "samples": points}, "denoiser.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
