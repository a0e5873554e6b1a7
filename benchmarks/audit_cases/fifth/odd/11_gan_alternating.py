"""GAN on 2-D rings, manual optimisation with alternating optimizers and two critic updates per generator update."""
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning.pytorch as pl


def rings(n, seed=1):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(n, generator=g)
    radius = torch.where(torch.rand(n, generator=g) < 0.5, 1.0, 2.0) + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))


class RingGAN(pl.LightningModule):
    def __init__(self, latent=8, critic_steps=2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def on_fit_start(self):
        self.noise = torch.Generator().manual_seed(500 + self.global_rank)

    def sample(self, n):
        return self.gen(torch.randn(n, self.hparams.latent, generator=self.noise))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_c = self.optimizers()
        bce = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(opt_c)
        fake = self.sample(len(real)).detach()
        on_real, on_fake = self.critic(real), self.critic(fake)
        loss_c = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
        opt_c.zero_grad()
        self.manual_backward(loss_c)
        opt_c.step()
        self.untoggle_optimizer(opt_c)

        if (batch_idx + 1) % self.hparams.critic_steps == 0:
            self.toggle_optimizer(opt_g)
            score = self.critic(self.sample(len(real)))
            loss_g = bce(score, torch.ones_like(score))
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
            self.untoggle_optimizer(opt_g)

    def configure_optimizers(self):
        return (torch.optim.Adam(self.gen.parameters(), lr=1e-3, betas=(0.5, 0.99)),
                torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.99)))


if __name__ == "__main__":
    pl.seed_everything(3)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true",
                         max_epochs=3, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False)
    gan = RingGAN()
    trainer.fit(gan, DataLoader(rings(1024), batch_size=32, shuffle=True))
    with torch.no_grad():
        radius = gan.gen(torch.randn(256, 8)).norm(dim=1)
    if trainer.is_global_zero:
        print(f"mean radius {radius.mean():.3f}")
