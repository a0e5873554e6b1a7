"""Classification with a one-cycle schedule."""
import pytorch_lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 3, 16


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, _):
        x, y = batch
        return self.loss(self(x), y)

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print("epoch", self.current_epoch, "lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-3)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=1e-2, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": opt, "lr_scheduler": sched}


def loader():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(384, 8, generator=g)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=BATCH, shuffle=True)


def main():
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), loader())


if __name__ == "__main__":
    main()
