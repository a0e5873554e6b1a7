"""Regression of a noisy surface; validation and the saved file use an average of the weights."""
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class WeightAverage(L.Callback):
    """Keeps a slow copy of all parameters and lends it to the model while it is validated."""

    def __init__(self, decay=0.95, path="averaged.pt"):
        self.decay = decay
        self.path = path
        self.slow = None
        self.fast = None

    def on_train_start(self, trainer, module):
        self.slow = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for n, p in module.named_parameters():
            self.slow[n].lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def on_validation_epoch_start(self, trainer, module):
        if self.slow is None:
            return
        self.fast = {n: p.detach().clone() for n, p in module.named_parameters()}
        for n, p in module.named_parameters():
            p.copy_(self.slow[n])

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer, module):
        if self.fast is None:
            return
        for n, p in module.named_parameters():
            p.copy_(self.fast[n])
        self.fast = None

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(self.slow, self.path)


class Surface(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mse", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def points(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 2, generator=g) - 1
    y = (3 * x[:, :1]).sin() * (2 * x[:, 1:]).cos()
    return TensorDataset(x, y + noise * torch.randn(n, 1, generator=g))


def main():
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[WeightAverage()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(
        Surface(),
        DataLoader(points(1024, 1, 0.3), batch_size=16, shuffle=True),
        DataLoader(points(256, 2, 0.0), batch_size=64),
    )
    if trainer.is_global_zero:
        print("val mse", round(trainer.callback_metrics["val_mse"].item(), 5))


if __name__ == "__main__":
    main()
