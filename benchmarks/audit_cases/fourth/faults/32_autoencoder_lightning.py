import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)


class LowestLoss(Callback):
    """Keeps the checkpoint with the lowest validation loss and a small history file."""

    def __init__(self, path="lowest.ckpt"):
        self.path, self.lowest, self.history = path, float("inf"), []

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        loss = trainer.callback_metrics["val_loss"].item()
        self.history.append(loss)
        if trainer.is_global_zero and loss < self.lowest:
            self.lowest = loss
            trainer.save_checkpoint(self.path)

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            with open("history.txt", "w") as f:
                f.writelines(f"{v:.5f}\n" for v in self.history)


class AutoEncoder(L.LightningModule):
    def __init__(self, dim=24, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, x, idx):
        return nn.functional.mse_loss(self(x), x)

    def validation_step(self, x, idx):
        self.log("val_loss", nn.functional.mse_loss(self(x), x), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def points(n, seed):
    basis = torch.randn(4, 24, generator=torch.Generator().manual_seed(99))
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)) @ basis / 2


def main():
    L.seed_everything(2)
    best = LowestLoss()
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", callbacks=[best],
                        logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    trainer.fit(AutoEncoder(),
                DataLoader(points(160, 0), batch_size=10, shuffle=True),
                DataLoader(points(40, 1), batch_size=10))
    trainer.print("lowest", best.lowest, "history", [round(v, 4) for v in best.history])


if __name__ == "__main__":
    main()
