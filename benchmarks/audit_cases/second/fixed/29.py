import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from proj29.stream import ClickStream


class ClickModel(pl.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        loss = self.trainer.callback_metrics["train_loss"]
        self.print(f"epoch {self.current_epoch}: {loss:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    pl.seed_everything(0, verbose=False)
    loader = DataLoader(ClickStream(range(8)), batch_size=16)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(ClickModel(), loader)


if __name__ == "__main__":
    main()
