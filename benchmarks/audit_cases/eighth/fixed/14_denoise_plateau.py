"""Denoising of 1-D spectra; the learning rate is halved when the validation loss stalls."""
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    """Sums of a few Gaussian peaks, with and without detector noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        grid = torch.linspace(0, 1, 64)
        centers = torch.rand(n, 3, 1, generator=g)
        widths = 0.02 + 0.06 * torch.rand(n, 3, 1, generator=g)
        heights = torch.rand(n, 3, 1, generator=g)
        self.clean = (heights * torch.exp(-((grid - centers) / widths) ** 2)).sum(1)
        self.noisy = self.clean + 0.2 * torch.randn(n, 64, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.noisy[i], self.clean[i]


class Denoiser(L.LightningModule):
    def __init__(self, lr=2e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(),
            nn.Conv1d(16, 16, 7, padding=3), nn.ReLU(),
            nn.Conv1d(16, 1, 7, padding=3),
        )

    def forward(self, x):
        return self.net(x.unsqueeze(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = nn.functional.mse_loss(self(noisy), clean)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = nn.functional.mse_loss(self(noisy), clean)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class PrintRates(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: lr {trainer.optimizers[0].param_groups[0]['lr']:.5f}")


def main():
    L.seed_everything(21)
    train = DataLoader(Spectra(512, seed=1), batch_size=16, shuffle=True)
    val = DataLoader(Spectra(64, seed=2), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=10, num_sanity_val_steps=0,
        callbacks=[PrintRates()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Denoiser(), train, val)


if __name__ == "__main__":
    main()
