"""Beta-VAE on synthetic 8x8 blobs, with a linear warm-up of beta."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, n=768, seed=3):
        gen = torch.Generator().manual_seed(seed)
        grid = torch.arange(8).float()
        cx, cy = torch.rand(2, n, 1, 1, generator=gen) * 7
        width = 1 + torch.rand(n, 1, 1, generator=gen)
        d2 = (grid.view(1, 8, 1) - cx) ** 2 + (grid.view(1, 1, 8) - cy) ** 2
        self.images = torch.exp(-d2 / (2 * width**2)).flatten(1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class VAE(nn.Module):
    def __init__(self, latent=4, hidden=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, 64))
        self.latent = latent
        self.beta = 0.0

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        recon = F.mse_loss(self.dec(z), x, reduction="none").sum(-1).mean()
        kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(-1).mean()
        return recon + self.beta * kl, recon.detach(), kl.detach()

    def sample(self, n, generator):
        return self.dec(torch.randn(n, self.latent, generator=generator))


def train(epochs=3, warmup=20):
    accelerator = Accelerator(cpu=True)
    set_seed(100, device_specific=True)
    loader = DataLoader(Blobs(), batch_size=32, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    vae = accelerator.unwrap_model(model)

    step = 0
    for epoch in range(epochs):
        model.train()
        stats = torch.zeros(2)
        for x in loader:
            vae.beta = 0.5 * min(1.0, step / warmup)
            loss, recon, kl = vae(x)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            stats += torch.stack([recon, kl])
            step += 1
        stats = accelerator.reduce(stats / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch} recon {stats[0]:.3f} kl {stats[1]:.3f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with torch.no_grad():
            pictures = vae.sample(16, torch.Generator().manual_seed(0))
        torch.save({"model": vae.state_dict(), "samples": pictures}, "vae.pt")


if __name__ == "__main__":
    train()
