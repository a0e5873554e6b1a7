"""Small GAN on a ring of Gaussians, two optimizers with manual optimization."""
import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LATENT = 8


def ring(n, modes=8):
    g = torch.Generator().manual_seed(5)
    k = torch.randint(0, modes, (n,), generator=g)
    angle = 2 * math.pi * k / modes
    centers = torch.stack([angle.cos(), angle.sin()], dim=1) * 2
    return TensorDataset(centers + 0.05 * torch.randn(n, 2, generator=g))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, o))


class RingGAN(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = mlp(LATENT, 2)
        self.critic = mlp(2, 1)

    def forward(self, n):
        return self.generator(torch.randn(n, LATENT, device=self.device))

    def training_step(self, batch, batch_idx):
        real, = batch
        opt_g, opt_d = self.optimizers()

        # critic
        fake = self(real.size(0)).detach()
        d_real, d_fake = self.critic(real), self.critic(fake)
        d_loss = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        # generator
        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.critic(self(real.size(0)))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.log_dict({"d_loss": d_loss, "g_loss": g_loss},
                      on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: d {m['d_loss']:.3f} g {m['g_loss']:.3f}")

    def configure_optimizers(self):
        lr = self.hparams.lr
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(0.5, 0.99))
        opt_d = torch.optim.Adam(self.critic.parameters(), lr=lr, betas=(0.5, 0.99))
        return opt_g, opt_d


if __name__ == "__main__":
    loader = DataLoader(ring(2048), batch_size=64, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_find_unused_parameters_true",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(RingGAN(), loader)
