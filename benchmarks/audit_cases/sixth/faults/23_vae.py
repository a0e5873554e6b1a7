"""Variational autoencoder on synthetic spectra."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--latent", type=int, default=4)
parser.add_argument("--beta", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()


def spectra(n, bins=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 1, bins)
    pos = torch.rand(n, 2, 1, generator=g)
    width = 0.02 + 0.05 * torch.rand(n, 2, 1, generator=g)
    peaks = torch.exp(-((grid - pos) ** 2) / (2 * width**2)).sum(1)
    return peaks + 0.02 * torch.randn(n, bins, generator=g)


class VAE(nn.Module):
    def __init__(self, bins=64, hidden=96, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(bins, hidden), nn.GELU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, bins))

    def forward(self, x):
        mu, _ = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mu)

    def elbo(self, x, beta):
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        recon = F.mse_loss(self.decoder(z), x, reduction="none").sum(-1)
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(-1)
        return (recon + beta * kl).mean()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(11, device_specific=True)

    train_loader = DataLoader(
        TensorDataset(spectra(1024, seed=0)), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    test_loader = DataLoader(TensorDataset(spectra(130, seed=1)), batch_size=args.batch_size)
    model = VAE(latent=args.latent)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    vae = accelerator.unwrap_model(model)

    for epoch in range(args.epochs):
        model.train()
        epoch_loss = torch.zeros(())
        for (x,) in train_loader:
            optimizer.zero_grad()
            loss = vae.elbo(x, args.beta)
            accelerator.backward(loss)
            optimizer.step()
            epoch_loss += loss.detach()

        model.eval()
        errors = []
        with torch.no_grad():
            for (x,) in test_loader:
                err = (model(x) - x).pow(2).mean(-1)
                errors.append(accelerator.gather_for_metrics(err))
        test_mse = torch.cat(errors).mean().item()
        train_loss = accelerator.reduce(epoch_loss / len(train_loader), reduction="mean").item()
        accelerator.print(f"epoch {epoch}  elbo {train_loss:.3f}  test mse {test_mse:.5f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(vae.state_dict(), "vae.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
