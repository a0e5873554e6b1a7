# toy denoising diffusion on 2d points, with gradient accumulation
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
T = 50


def two_moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * math.pi
    side = torch.randint(0, 2, (n,), generator=g).float()
    x = torch.stack([torch.cos(t) + side, torch.sin(t) * (1 - 2 * side) + 0.5 * side], 1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.body(self.inp(x) + self.time(t))


class Noise:
    def __init__(self):
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.05, T), 0)

    def add(self, x, eps, t):
        a = self.alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * eps


def train(epochs=2, max_grad_norm=0.3):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    set_seed(21)
    net, noise = Denoiser(), Noise()
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(two_moons(512, 0), batch_size=8, shuffle=True)
    net, opt, loader = accelerator.prepare(net, opt, loader)
    draws = torch.Generator().manual_seed(100 + accelerator.process_index)
    step = 0
    for epoch in range(epochs):
        running = torch.zeros(())
        for x in loader:
            with accelerator.accumulate(net):
                t = torch.randint(0, T, (len(x),), generator=draws)
                eps = torch.randn(x.shape, generator=draws)
                loss = nn.functional.mse_loss(net(noise.add(x, eps, t), t), eps)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), max_grad_norm)
                opt.step()
                opt.zero_grad()
            running += loss.detach()
            if accelerator.sync_gradients:
                step += 1
        mean = accelerator.reduce(running / len(loader), reduction="mean")
        norm = sum(p.detach().double().pow(2).sum() for p in net.parameters()).sqrt()
        accelerator.print(f"epoch {epoch} updates {step} loss {mean.item():.5f} |w| {norm.item():.6f}")

    fresh = two_moons(128, 9)
    g = torch.Generator().manual_seed(5)
    t, eps = torch.randint(0, T, (128,), generator=g), torch.randn(128, 2, generator=g)
    with torch.no_grad():
        err = nn.functional.mse_loss(accelerator.unwrap_model(net)(noise.add(fresh, eps, t), t), eps)
    accelerator.print(f"held-out {err.item():.5f}")


if __name__ == "__main__":
    train()
