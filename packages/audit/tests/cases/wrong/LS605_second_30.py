import pytorch_lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.model(x), y)
        self.log("val_loss", loss, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Data(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        g = torch.Generator().manual_seed(4)
        w = torch.randn(6, 1, generator=g)
        x = torch.randn(384, 6, generator=g)
        y = x @ w + torch.randn(384, 1, generator=g)
        self.train = TensorDataset(x[:256], y[:256])
        self.val = TensorDataset(x[256:], y[256:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


def main():
    L.seed_everything(7, verbose=False)
    best = ModelCheckpoint(dirpath="ckpt", monitor="val_loss", mode="min", save_top_k=1, filename="best-{epoch}")
    trainer = L.Trainer(
        max_epochs=6, accelerator="cpu", devices=2, strategy="ddp", callbacks=[best],
        num_sanity_val_steps=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Regressor(), datamodule=Data())
    if trainer.is_global_zero:
        print(f"best model {best.best_model_path.split('/')[-1]} with val_loss {best.best_model_score:.4f}")


if __name__ == "__main__":
    main()
