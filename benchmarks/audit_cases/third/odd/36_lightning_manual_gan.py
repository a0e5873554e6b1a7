import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.gen = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        self.disc = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def on_fit_start(self):
        self.noise = torch.Generator().manual_seed(10 + self.global_rank)

    def sample(self, n):
        return self.gen(torch.randn(n, 3, generator=self.noise))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(opt_d)
        fake = self.sample(len(real)).detach()
        loss_d = F.binary_cross_entropy_with_logits(self.disc(real), ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(self.disc(fake), zeros)
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        loss_g = F.binary_cross_entropy_with_logits(self.disc(self.sample(len(real))), ones)
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"d": loss_d, "g": loss_g}, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.gen.parameters(), 1e-3), torch.optim.Adam(self.disc.parameters(), 1e-3)


if __name__ == "__main__":
    L.seed_everything(1)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(96, 2, generator=g) * 0.2 + 1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=2,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(GAN(), DataLoader(data, batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print({k: round(v.item(), 3) for k, v in trainer.callback_metrics.items()})
