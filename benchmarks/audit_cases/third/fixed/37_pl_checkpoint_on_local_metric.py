import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitRegressor(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss, on_epoch=True, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(128, 6, generator=g)
        y = x[:, :1] * x[:, 1:2]
        self.train, self.val = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


def main():
    L.seed_everything(3)
    best = ModelCheckpoint(dirpath="ckpt", filename="best", monitor="val_loss", mode="min")
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[best], logger=False,
                        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(LitRegressor(), datamodule=Data())
    if trainer.is_global_zero:
        print(f"best val_loss {best.best_model_score:.4f} in {best.best_model_path}")


if __name__ == "__main__":
    main()
