"""A GAN on a ring of Gaussians: several critic updates for each generator update."""
import math

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.randint(0, 8, (n,), generator=g) / 8
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(points + 0.05 * torch.randn(n, 2, generator=g))


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, n_out))


class RingGAN(L.LightningModule):
    def __init__(self, latent=8, critic_steps=2):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.critic_steps = critic_steps
        self.generator = mlp(latent, 2)
        self.critic = mlp(2, 1)

    def on_fit_start(self):
        self.noise = torch.Generator().manual_seed(1000 + self.global_rank)

    def sample(self, n):
        return self.generator(torch.randn(n, self.latent, generator=self.noise))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_c = self.optimizers()

        self.toggle_optimizer(opt_c)
        fake = self.sample(len(real)).detach()
        loss_c = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        opt_c.zero_grad()
        self.manual_backward(loss_c)
        opt_c.step()
        self.untoggle_optimizer(opt_c)

        if (batch_idx + 1) % self.critic_steps == 0:
            self.toggle_optimizer(opt_g)
            loss_g = F.softplus(-self.critic(self.sample(len(real)))).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("loss_g", loss_g, on_step=False, on_epoch=True, sync_dist=True)
        self.log("loss_c", loss_c, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        opt_c = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
        return [opt_g, opt_c]


def main():
    L.seed_everything(2)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(RingGAN(), DataLoader(ring(1024, 1), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
