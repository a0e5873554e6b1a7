# A small denoising diffusion model with Accelerate.
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

T = 100


class Denoiser(nn.Module):
    def __init__(self, dim=2, width=64):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(dim, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)))


def moons(n=768):
    g = torch.Generator().manual_seed(0)
    a = torch.rand(n, generator=g) * 3.1416
    side = torch.randint(2, (n,), generator=g).float()
    x = torch.stack([a.cos() + side, (1 - 2 * side) * a.sin()], 1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1234)
    loader = DataLoader(TensorDataset(moons()), batch_size=32, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.05, T), 0)

    for epoch in range(3):
        losses = []
        for (x,) in loader:
            t = torch.randint(0, T, (len(x),))
            noise = torch.randn_like(x)
            a = alpha_bar[t].unsqueeze(1)
            noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        accelerator.print(f"epoch {epoch} loss {mean.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
