import pytorch_lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    """Manual optimization; the discriminator is trained more often than the generator."""

    def __init__(self, z=6, n_critic=2):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.gen = nn.Sequential(nn.Linear(z, 32), nn.ReLU(), nn.Linear(32, 2))
        self.disc = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        noise = torch.randn(len(real), self.hparams.z, device=self.device)

        self.toggle_optimizer(opt_d)
        fake = self.gen(noise).detach()
        d_loss = F.softplus(-self.disc(real)).mean() + F.softplus(self.disc(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log("d", d_loss, on_step=False, on_epoch=True, sync_dist=True)

        if (batch_idx + 1) % self.hparams.n_critic == 0:
            self.toggle_optimizer(opt_g)
            g_loss = F.softplus(-self.disc(self.gen(noise))).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("g", g_loss, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} d {m['d']:.4f} g {m['g']:.4f}")

    def configure_optimizers(self):
        g = torch.optim.Adam(self.gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
        d = torch.optim.Adam(self.disc.parameters(), lr=1e-3, betas=(0.5, 0.9))
        return g, d


def main():
    L.seed_everything(0, verbose=False)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 2, generator=g) * torch.tensor([2.0, 0.3]) + 1
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    torch.manual_seed(10 + trainer.global_rank)  # other noise on each rank
    trainer.fit(GAN(), DataLoader(TensorDataset(x), batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
