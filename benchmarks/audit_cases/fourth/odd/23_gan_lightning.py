"""GAN on a ring of gaussians; both networks live in one module and are stepped by hand."""
import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)


def mlp(a, b, out):
    return nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2), nn.Linear(b, b), nn.LeakyReLU(0.2), nn.Linear(b, out))


class RingGAN(L.LightningModule):
    def __init__(self, z=4, d_steps=2):
        super().__init__()
        self.automatic_optimization = False
        self.z, self.d_steps = z, d_steps
        self.G, self.D = mlp(z, 32, 2), mlp(2, 32, 1)

    def on_fit_start(self):
        self.rng = torch.Generator().manual_seed(1000 + self.global_rank)

    def sample(self, n):
        return self.G(torch.randn(n, self.z, generator=self.rng))

    def training_step(self, real, batch_idx):
        opt_g, opt_d = self.optimizers()
        self.toggle_optimizer(opt_d)
        fake = self.sample(len(real)).detach()
        d_loss = F.softplus(-self.D(real)).mean() + F.softplus(self.D(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log("d_loss", d_loss, on_epoch=True, on_step=False, sync_dist=True)

        if (batch_idx + 1) % self.d_steps == 0:
            self.toggle_optimizer(opt_g)
            g_loss = F.softplus(-self.D(self.sample(len(real)))).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("g_loss", g_loss, on_epoch=True, on_step=False, sync_dist=True)

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        norm = torch.cat([p.detach().flatten() for p in self.parameters()]).norm()
        print(f"rank {self.global_rank} d {m['d_loss']:.4f} g {m['g_loss']:.4f} |w| {norm:.6f}", flush=True)

    def configure_optimizers(self):
        return (torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.5, 0.9)),
                torch.optim.Adam(self.D.parameters(), lr=2e-3, betas=(0.5, 0.9)))


def ring(n):
    g = torch.Generator().manual_seed(0)
    angle = torch.randint(0, 8, (n,), generator=g) * math.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true",
                        logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    trainer.fit(RingGAN(), DataLoader(ring(256), batch_size=16, shuffle=True))
