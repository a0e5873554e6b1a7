"""Denoising autoencoder with an interruption: each rank keeps its own random state in a file of its own."""
from pathlib import Path

import pytorch_lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RUN = Path("denoise_run")


def make_spectra(n, seed, bins=48):
    g = torch.Generator().manual_seed(seed)
    axis = torch.linspace(0, 1, bins)
    centre = torch.rand(n, 2, 1, generator=g)
    height = 0.5 + torch.rand(n, 2, 1, generator=g)
    peaks = height * torch.exp(-((axis - centre) / 0.06) ** 2)
    return TensorDataset(peaks.sum(1))


class Denoiser(L.LightningModule):
    def __init__(self, bins=48, lr=2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(bins, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(),
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, bins),
        )

    def training_step(self, batch, batch_idx):
        (clean,) = batch
        noisy = clean + 0.2 * torch.randn_like(clean)
        loss = F.mse_loss(self.net(noisy), clean)
        self.log("train_mse", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class RankRandomState(L.Callback):
    """The noise differs between ranks, so the state of the generator cannot stand in the common checkpoint."""

    def __init__(self, resume):
        self.resume = resume

    def path(self, trainer):
        return RUN / f"random_{trainer.global_rank}.pt"

    def on_train_start(self, trainer, pl_module):
        if self.resume:
            torch.set_rng_state(torch.load(self.path(trainer)))
        else:
            torch.manual_seed(200 + trainer.global_rank)

    def on_train_end(self, trainer, pl_module):
        RUN.mkdir(parents=True, exist_ok=True)
        torch.save(torch.get_rng_state(), self.path(trainer))


def make_trainer(epochs, resume):
    return L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs,
        callbacks=[RankRandomState(resume)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )


def make_loader():
    return DataLoader(make_spectra(1024, 0), batch_size=32, shuffle=True)


def main():
    L.seed_everything(22)
    first = make_trainer(2, resume=False)
    first.fit(Denoiser(), make_loader())
    # called by all ranks: the first one writes, the others wait for it
    first.save_checkpoint(RUN / "last.ckpt")
    if first.is_global_zero:
        print(f"interrupted at epoch {first.current_epoch}, mse {first.callback_metrics['train_mse']:.4f}")

    second = make_trainer(5, resume=True)
    second.fit(Denoiser(), make_loader(), ckpt_path=RUN / "last.ckpt")
    if second.is_global_zero:
        print(f"finished at epoch {second.current_epoch}, mse {second.callback_metrics['train_mse']:.4f}")


if __name__ == "__main__":
    main()
