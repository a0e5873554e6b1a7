"""A small GAN that learns a ring of eight gaussians."""
import math

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 8, (n,), generator=g)
    angle = k.float() * (2 * math.pi / 8)
    centers = torch.stack([angle.cos(), angle.sin()], dim=1) * 2.0
    return centers + 0.05 * torch.randn(n, 2, generator=g)


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


class RingGAN(pl.LightningModule):
    def __init__(self, latent=8, lr=5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = mlp(latent, 64, 2)
        self.discriminator = mlp(2, 64, 1)

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.size(0), self.hparams.latent, device=self.device)

        # discriminator
        fake = self(z).detach()
        d_real = self.discriminator(real)
        d_fake = self.discriminator(fake)
        d_loss = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        # generator
        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.discriminator(self(z))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.log_dict({"d_loss": d_loss.detach(), "g_loss": g_loss.detach()}, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.99))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.99))
        return opt_g, opt_d

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: d {m['d_loss']:.4f}  g {m['g_loss']:.4f}")


def main():
    pl.seed_everything(7)
    loader = DataLoader(TensorDataset(ring(2048, seed=1)), batch_size=64, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(RingGAN(), loader)


if __name__ == "__main__":
    main()
