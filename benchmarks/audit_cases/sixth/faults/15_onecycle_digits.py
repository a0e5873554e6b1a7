"""Row-wise GRU on synthetic digit-like images with a one-cycle schedule."""
import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH = 32


def images(n, seed):
    protos = torch.randn(10, 12, 12, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(protos[y] + 1.5 * torch.randn(n, 12, 12, generator=g), y)


class RowNet(pl.LightningModule):
    def __init__(self, n_train, max_lr=5e-3):
        super().__init__()
        self.n_train = n_train
        self.max_lr = max_lr
        self.rnn = nn.GRU(12, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.head(h[-1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        acc = (self(x).argmax(1) == y).float().mean()
        self.log("val_acc", acc, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.max_lr)
        steps_per_epoch = self.n_train // BATCH
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt,
            max_lr=self.max_lr,
            total_steps=steps_per_epoch * EPOCHS,
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.print(f"epoch {self.current_epoch} loss {m['loss']:.3f} val_acc {m['val_acc']:.3f} lr {lr:.6f}")


def main():
    pl.seed_everything(1)
    train_set, val_set = images(1536, 0), images(256, 1)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    model = RowNet(len(train_set))
    trainer.fit(model, DataLoader(train_set, batch_size=BATCH, shuffle=True), DataLoader(val_set, batch_size=BATCH))


if __name__ == "__main__":
    main()
