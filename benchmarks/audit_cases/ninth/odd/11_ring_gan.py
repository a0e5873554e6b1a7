"""A small GAN on a ring of Gaussians: two optimizers, stepped by hand."""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LATENT = 8


def ring(n, seed, modes=8):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, modes, (n,), generator=g)
    angle = 2 * torch.pi * k / modes
    centre = torch.stack([angle.cos(), angle.sin()], dim=1)
    return centre + 0.05 * torch.randn(n, 2, generator=g)


def mlp(n_in, n_out, hidden=64):
    return nn.Sequential(
        nn.Linear(n_in, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, n_out),
    )


class RingGAN(L.LightningModule):
    def __init__(self, lr_g=1e-3, lr_d=2e-3):
        super().__init__()
        self.automatic_optimization = False
        self.lr_g, self.lr_d = lr_g, lr_d
        self.generator = mlp(LATENT, 2)
        self.critic = mlp(2, 1)

    def on_fit_start(self):
        # the weights are equal by now; the noise shall differ from rank to rank
        torch.manual_seed(1000 + self.global_rank)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()

        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), LATENT))
        d_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()

        # the generator moves only every second step
        if batch_idx % 2 == 1:
            fake = self.generator(torch.randn(len(real), LATENT))
            g_loss = F.softplus(-self.critic(fake)).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.log("g_loss", g_loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("d_loss", d_loss.detach(), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        with torch.no_grad():
            radius = self.generator(torch.randn(256, LATENT)).norm(dim=1).mean()
        radius = self.all_gather(radius).mean()
        self.print(f"epoch {self.current_epoch} mean radius of samples {radius.item():.3f}")

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.lr_g, betas=(0.5, 0.99))
        opt_d = torch.optim.Adam(self.critic.parameters(), lr=self.lr_d, betas=(0.5, 0.99))
        return [opt_g, opt_d]


def main():
    L.seed_everything(4)
    loader = DataLoader(TensorDataset(ring(2048, seed=0)), batch_size=64, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(RingGAN(), loader)
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"d loss {metrics['d_loss']:.4f}  g loss {metrics['g_loss']:.4f}")


if __name__ == "__main__":
    main()
